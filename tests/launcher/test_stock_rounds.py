"""Rounds are what Megatron's own samplers yield on all replicas, over epochs and from any place."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_magi.launcher  # noqa: F401  prepares megatron before it is imported
from megatron_magi.launcher.balanced_loader import BalancedSampler
from megatron_magi.launcher.stock_rounds import StockRounds

samplers = pytest.importorskip("megatron.training.datasets.data_samplers")

KINDS = ["single", "one list", "shards"]


def sampler(kind: str, total: int, consumed: int, micro: int, rank: int, replicas: int) -> Any:
    if kind == "single":
        return samplers.MegatronPretrainingSampler(total, consumed, micro, rank, replicas)
    return samplers.MegatronPretrainingRandomSampler(
        None, total, consumed, micro, rank, replicas, kind == "shards"
    )


@pytest.mark.parametrize("kind", KINDS)
@given(
    replicas=st.integers(1, 4),
    micro=st.integers(1, 3),
    rounds=st.integers(1, 5),
    rest=st.integers(0, 3),
    consumed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=40)
def test_rounds_are_those_of_the_replicas(
    kind: str, replicas: int, micro: int, rounds: int, rest: int, consumed: int
) -> None:
    batch = replicas * micro
    total = rounds * batch + min(rest, micro - 1)  # all replicas have equally many microbatches
    begun = batch * (consumed % rounds if kind == "single" else consumed)
    each = [sampler(kind, total, begun, micro, rank, replicas) for rank in range(replicas)]
    ours = StockRounds(each[0])
    for _ in range(1 if kind == "single" else 3):  # epochs
        wanted = [np.array(group) for group in zip(*each, strict=True)]
        found = [*StockRounds(each[0])] if not wanted else [*ours]
        assert len(found) == len(wanted)
        assert all((a == b).all() for a, b in zip(found, wanted, strict=True))


def test_an_incomplete_round_is_dropped() -> None:
    ours = StockRounds(sampler("one list", 10, 0, 1, 0, 4))
    assert [len([*ours]) for _ in range(3)] == [2, 2, 2], "8 of 10 samples an epoch"


def reversed_step(rounds: np.ndarray) -> np.ndarray:
    """A dealing that can be seen: the step's samples backwards."""
    return rounds.reshape(-1)[::-1].reshape(rounds.swapaxes(0, 1).shape)


def dealt(rank: int, consumed: int, count: int) -> list[list[int]]:
    """Microbatches of a replica, in epochs of 3; steps of 2, and of 4 from 16 samples on."""
    ours = BalancedSampler(
        sampler("one list", 12, consumed, 2, rank, 2),
        consumed,
        lambda place: 2 if place < 16 else 4,
        reversed_step,
    )

    def forever() -> Any:
        while True:
            yield from ours

    return list(islice(forever(), count))


def test_a_step_goes_on_in_the_next_epoch() -> None:
    both = [dealt(rank, 0, 12) for rank in range(2)]
    stock = [sampler("one list", 12, 0, 2, rank, 2) for rank in range(2)]
    wanted = [[group for _ in range(4) for group in each] for each in stock]
    for first, last in ((0, 2), (2, 4), (4, 8), (8, 12)):  # two steps of 2 rounds, two of 4
        found = [sorted(np.ravel([each[first:last] for each in x])) for x in (both, wanted)]
        assert found[0] == found[1]


@pytest.mark.parametrize("consumed", [8, 16, 32])
def test_a_run_goes_on_where_it_ended(consumed: int) -> None:
    for rank in range(2):
        assert dealt(rank, 0, 20)[consumed // 4 :] == dealt(rank, consumed, 20 - consumed // 4)
