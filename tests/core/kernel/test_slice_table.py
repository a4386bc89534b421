"""Slices are read once: by their tensor, else by what is in it."""

from __future__ import annotations

import gc

import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel import slice_table
from megatron_magi.core.kernel.slice_table import ByIdentity, slices_tensor


def test_a_tensor_of_slices_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    plain = slice_table._from_content
    monkeypatch.setattr(slice_table, "_from_content", lambda *a: read.append(a) or plain(*a))
    slices = slices_tensor(masks.causal(12)).clone()
    tables = [slice_table.slice_table(slices, 12, 12) for _ in range(3)]
    assert len(read) == 1 and all(table is tables[0] for table in tables)
    slice_table.slice_table(slices, 13, 12)
    assert len(read) == 2


def test_equal_slices_share_one_table() -> None:
    slices = slices_tensor(masks.causal(12))
    table = slice_table.slice_table(slices, 12, 12)
    assert slice_table.slice_table(slices.clone(), 12, 12) is table
    assert slice_table.slice_table(slices.long(), 12, 12) is table
    assert slice_table.slice_table(slices.clone(), 12, 13) is not table


def test_a_change_in_place_is_noticed() -> None:
    slices = slices_tensor(masks.causal(12)).clone()
    before = slice_table.slice_table(slices, 12, 12)
    slices.copy_(slices_tensor(masks.full(12)))
    after = slice_table.slice_table(slices, 12, 12)
    assert after is not before and after.slices.tolist() == masks.full(12).slices.tolist()


def test_an_integer_of_two_words_is_not_taken_for_two() -> None:
    """The bytes of int64 [2, 3] are those of int32 [2, 6]."""
    twice = slices_tensor(masks.from_cu_seqlens([0, 5, 12])).clone()
    assert twice.shape == (2, 6)
    slice_table.slice_table(twice, 12, 12)
    with pytest.raises(ValueError, match=r"must have shape \[num_slices, 6\].*got \[2, 3\]"):
        slice_table.slice_table(twice.view(torch.int64), 12, 12)


def test_wrong_slices_are_refused_every_time() -> None:
    slices = slices_tensor(masks.causal(12))
    for _ in range(2):
        with pytest.raises(ValueError, match="12"):
            slice_table.slice_table(slices, 8, 8)


def test_no_slices_are_a_table() -> None:
    table = slice_table.slice_table(torch.zeros(0, 6, dtype=torch.int32), 4, 4)
    assert table.slices.shape == (0, 6) and table.covered_rows.shape == (0, 2)


def test_equal_objects_have_values_of_their_own() -> None:
    kept: ByIdentity[int] = ByIdentity()
    first, second = masks.causal(8), masks.causal(8)
    kept[first] = 1
    assert first == second and kept.get(first) == 1 and kept.get(second) is None
    kept[first] = 2
    assert kept.get(first) == 2 and len(kept) == 1


def test_an_entry_ends_with_its_object() -> None:
    kept: ByIdentity[str] = ByIdentity()
    for number in range(100):  # ids are used again
        key = torch.zeros(3)
        assert kept.get(key) is None
        kept[key] = str(number)
    gc.collect()
    assert kept.get(key) == "99" and len(kept) == 1
    del key
    gc.collect()
    assert len(kept) == 0


def test_a_tensor_is_recognised_after_autograd_alone_has_held_it() -> None:
    kept: ByIdentity[str] = ByIdentity()

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rows):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(rows)
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (rows,) = ctx.saved_tensors
            found.append(kept.get(rows))
            return grad * 2, None

    found: list[str | None] = []
    rows = torch.zeros(3)
    kept[rows] = "kept"
    out = Saving.apply(torch.ones(2, requires_grad=True), rows)
    del rows
    gc.collect()
    out.sum().backward()
    assert found == ["kept"]


def test_the_entry_of_a_dead_object_is_not_that_of_one_with_its_id() -> None:
    """The dead one's entry may still be there, if its end was not reported yet."""
    kept: ByIdentity[int] = ByIdentity()
    dead, alive = masks.causal(4), masks.causal(4)
    kept[dead] = 1
    kept._entries[id(alive)] = kept._entries[id(dead)]
    assert kept.get(alive) is None and kept.get(dead) == 1
