"""Boundaries that the first tensor-parallel rank tells the others, without the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_magi.launcher.microbatch_documents import Microbatch
from megatron_magi.launcher.tp_broadcast import TensorRanks
from tests.process_pool import pool

TIMEOUT_S = 60


def share(rank: int, lists: list[list[int]]) -> list[list[int]]:
    ranks = TensorRanks(dist.group.WORLD, TIMEOUT_S)
    with torch.device("meta"):  # a job's default device, which holds nothing for gloo
        return ranks.share(lists if rank == 0 else [])


def step(rank: int, known: bool) -> tuple[Any, list[Any]]:
    """(boundaries of the step, those that were planned ahead); only rank 0 has samples."""
    ahead: list[Any] = []
    microbatch = Microbatch(lambda sample: sample["read"], ahead.append)
    microbatch.ranks = TensorRanks(dist.group.WORLD, TIMEOUT_S)
    microbatch.begin(None)
    if rank == 0 and known:
        samples = [{"tokens": torch.ones(1, 8), "read": [0, i, 8]} for i in (1, 2)]
        microbatch.see_ahead(samples[0])
        microbatch.see_ahead(samples[1])
        microbatch.see(samples[0])
    first = microbatch.bounds()
    assert microbatch.bounds() == first, "asked twice, told once"
    return first, ahead


def test_lists_arrive_as_they_are() -> None:
    lists = [[0, 3, 8], [], [5], list(range(1000))]
    assert pool(2).run(share, lists) == [lists, lists]
    assert pool(2).run(share, []) == [[], []]


def test_all_ranks_know_the_documents_and_plan_ahead() -> None:
    expected = ([0, 1, 8], [[0, 1, 8], [0, 2, 8]])
    assert pool(2).run(step, True) == [expected, expected]


def test_all_ranks_ask_the_device_if_the_first_does() -> None:
    assert pool(2).run(step, False) == [(None, []), (None, [])]
