"""Merging two results of the same rows, against one softmax over both."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_magi.core.kernel.merge import merge_

F64 = torch.float64


def part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(out [1, 1, D], lse [1, 1]) of one row; no scores: 0 and -inf."""
    if len(scores) == 0:
        return torch.zeros(1, 1, values.shape[1], dtype=F64), torch.full((1, 1), -math.inf).to(F64)
    return (scores.softmax(0) @ values)[None, None], scores.logsumexp(0)[None, None]


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 2**31), st.sampled_from([1.0, 300.0]))
@settings(deadline=None)
def test_two_parts_are_one_softmax(first: int, second: int, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = size * torch.randn(first + second, generator=generator, dtype=F64)
    values = torch.randn(first + second, 3, generator=generator, dtype=F64)
    out, lse = part(scores[:first], values[:first])
    merge_(out, lse, *part(scores[first:], values[first:]))
    want_out, want_lse = part(scores, values)
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-14, atol=1e-12)


def test_it_writes_the_first_and_leaves_the_second() -> None:
    out, lse = torch.ones(2, 3, 4), torch.zeros(2, 3)
    other = torch.full((2, 3, 4), 5.0), torch.full((2, 3), math.log(3))
    before = [x.clone() for x in other]
    merge_(out, lse, *other)
    assert all(map(torch.equal, other, before))
    torch.testing.assert_close(out, torch.full((2, 3, 4), 4.0))
    torch.testing.assert_close(lse, torch.full((2, 3), math.log(4)))


@pytest.mark.parametrize("first", [False, True])
def test_nan_of_either_part_stays(first: bool) -> None:
    spoiled = torch.full((1, 1, 2), math.nan), torch.full((1, 1), math.nan)
    sound = torch.ones(1, 1, 2), torch.zeros(1, 1)
    into, other = (spoiled, sound) if first else (sound, spoiled)
    merge_(*into, *other)
    assert into[0].isnan().all() and into[1].isnan().all()
