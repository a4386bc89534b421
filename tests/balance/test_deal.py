"""Dealing a step: every sample once, equal counts, and never a fuller replica than in order."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.balance import deal_step, fullest, order_of_megatron


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    replicas, micro = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    count = replicas * micro * draw(st.integers(1, 5))
    costs = draw(st.lists(st.integers(0, 2**40), min_size=count, max_size=count))
    return np.array(costs, np.int64), replicas, micro


@given(steps(), st.booleans(), st.booleans())
@settings(deadline=None)
def test_a_step_is_dealt_once_and_never_worse(
    step: tuple[np.ndarray, int, int], pipelined: bool, lockstep: bool
) -> None:
    costs, replicas, micro = step
    dealt = deal_step(costs, replicas, micro, pipelined=pipelined, lockstep=lockstep)
    assert dealt.shape == (replicas, len(costs) // replicas // micro, micro)
    assert dealt.dtype == np.int64 and sorted(dealt.reshape(-1)) == list(range(len(costs)))
    order = order_of_megatron(len(costs), replicas, micro)
    assert fullest(costs, dealt, lockstep) <= fullest(costs, order, lockstep)
    again = deal_step(costs.copy(), replicas, micro, pipelined=pipelined, lockstep=lockstep)
    assert (dealt == again).all()


@given(steps())
@settings(deadline=None)
def test_slots_of_single_samples_are_the_least_possible(step: tuple[np.ndarray, int, int]) -> None:
    """Sorted samples share a slot: no other slots have a smaller sum of their largest."""
    costs, replicas, _ = step
    dealt = deal_step(costs, replicas, 1, lockstep=True)
    assert fullest(costs, dealt, True) == sum(sorted(costs, reverse=True)[::replicas])


@given(steps())
@settings(deadline=None)
def test_a_pipeline_begins_and_ends_with_the_cheapest(step: tuple[np.ndarray, int, int]) -> None:
    costs, replicas, micro = step
    for row in costs[deal_step(costs, replicas, micro, pipelined=True)].sum(axis=2):
        top = int(np.argmax(row))
        assert (np.diff(row[: top + 1]) >= 0).all() and (np.diff(row[top:]) <= 0).all()
        assert set(Counter(row.tolist())) >= {min(row)} and min(row[0], row[-1]) == min(row)


@given(steps())
@settings(deadline=None)
def test_replicas_that_meet_order_their_microbatches_alike(
    step: tuple[np.ndarray, int, int],
) -> None:
    costs, replicas, micro = step
    plain = deal_step(costs, replicas, micro, lockstep=True)
    ordered = deal_step(costs, replicas, micro, lockstep=True, pipelined=True)
    assert sorted(map(str, plain.swapaxes(0, 1))) == sorted(map(str, ordered.swapaxes(0, 1)))


def test_a_long_sample_is_alone_with_short_ones() -> None:
    costs = np.array([9, 1, 1, 9, 1, 1, 3, 3], np.int64)
    dealt = deal_step(costs, 2, 1)
    assert costs[dealt].sum(axis=(1, 2)).tolist() == [14, 14]


def test_equal_samples_stay_in_order() -> None:
    dealt = deal_step(np.full(12, 7, np.int64), 2, 2)
    assert (dealt == order_of_megatron(12, 2, 2)).all()
    assert dealt[1].tolist() == [[2, 3], [6, 7], [10, 11]], "as Megatron's sampler deals"


def test_a_step_of_other_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of 2 x 2 samples, got 6; pass"):
        deal_step(np.ones(6, np.int64), 2, 2)
