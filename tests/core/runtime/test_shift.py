"""A sequence is shifted over gloo as `torch.roll` shifts the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_magi as magi
from megatron_magi import masks
from tests.core.runtime.runtime_jobs import SHAPE
from tests.process_pool import on_subgroup, pool

WORLD = 5


@on_subgroup
def roll_matches_torch(rank: int, group: Any, length: int) -> None:
    plan = magi.plan(masks.causal(length), group, SHAPE)
    x = torch.arange(2.0 * length, dtype=torch.float64).view(length, 2).requires_grad_()
    weight = torch.sin(torch.arange(2.0 * length, dtype=torch.float64)).view(length, 2)
    for shift in (1, 2, -1, 0, length + 3):
        local = magi.shift_tokens(magi.dispatch(x, plan, group), shift, plan, group)
        shifted = magi.undispatch(local, plan, group)
        assert torch.equal(shifted, torch.roll(x, -shift, 0)), shift
        (grad,) = torch.autograd.grad((shifted * weight).sum(), x)
        assert torch.equal(grad, torch.roll(weight, shift, 0)), shift


@pytest.mark.parametrize("cp_size, length", [(1, 9), (2, 16), (3, 32), (4, 3), (5, 101)])
def test_roll(cp_size: int, length: int) -> None:
    pool(WORLD).run(roll_matches_torch, cp_size, length)
