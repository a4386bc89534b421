"""Values kept with objects by identity."""

from __future__ import annotations

import gc

import torch

from megatron_magi import masks
from megatron_magi.core.kernel.by_identity import ByIdentity


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
