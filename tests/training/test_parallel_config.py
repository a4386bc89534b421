"""Processes that a layout needs."""

from __future__ import annotations

import pytest

from megatron_magi.training.recipe.run_values import ParallelConfig


@pytest.mark.parametrize(
    ("layout", "replica", "alone"),
    [
        (ParallelConfig(), 1, 1),
        (ParallelConfig(tp=2, pp=3, cp=5), 30, 30),
        (ParallelConfig(tp=2, pp=3, cp=5, dp=4), 30, 120),
        (ParallelConfig(pp=2, vpp=3, ep=1), 2, 2),
    ],
    ids=["plain", "replica", "replicas", "interleaved"],
)
def test_a_replica_is_tp_pp_and_cp_and_a_run_as_many_as_are_asked_for(
    layout: ParallelConfig, replica: int, alone: int
) -> None:
    assert (layout.model_size, layout.num_processes) == (replica, alone)
