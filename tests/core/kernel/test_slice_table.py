"""Slices are read once: by their tensor, else by what is in it."""

from __future__ import annotations

import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel import slice_table
from megatron_magi.core.kernel.slice_table import slices_tensor


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
