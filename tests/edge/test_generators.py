"""The package draws from no global generator: weights drawn after it must not change."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import megatron_magi as magi
from tests.edge.call import Call
from tests.edge.test_public_edge import CALLS, label


def states() -> list[Any]:
    """Of Python's, numpy's and torch's global generators."""
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy_name, numbers, *rest = np.random.get_state()
    of_torch = [torch.get_rng_state(), *of_gpus]
    return [random.getstate(), numpy_name, list(numbers), rest, *(x.tolist() for x in of_torch)]


@pytest.mark.parametrize("call", CALLS, ids=label)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_public_call_draws_nothing(call: Call) -> None:
    before = states()
    if call.name != "draw_mask":
        call.function(**call.good)
    assert states() == before


def test_a_backward_draws_nothing() -> None:
    plan = magi.plan(magi.masks.causal(64), 1, magi.HeadShape(2, 1, 16))
    q, k, v = (torch.ones(64, heads, 16, requires_grad=True) for heads in (2, 1, 1))
    before = states()
    out, _ = magi.dist_attn(q, k, v, plan, None)
    out.sum().backward()
    assert states() == before


def test_the_check_sees_a_draw() -> None:
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        before = states()
        draw()
        assert states() != before
