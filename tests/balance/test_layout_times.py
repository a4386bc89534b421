"""Predicted steps: what waits for what, and which division is recommended."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.balance.layout_times import (
    CP_IMBALANCE,
    RECOMPUTED,
    Division,
    LayoutTime,
    Machine,
    Prices,
    divisions,
    has_nothing_to_gain,
    pipeline_seconds,
    price,
    recommended,
)

FOUR = Machine(gpus=4, gpus_per_node=8, model_gpus=1)
COSTS = np.array([[1.0, 2, 3, 10], [4, 4, 4, 4]])


def prices(costs: Any = COSTS, exchange: float = 0.0) -> Prices:
    return Prices(np.array(costs, dtype=float), 100, lambda cp, joined, tokens: exchange)


def test_replicas_wait_for_the_slowest() -> None:
    found = price(Division(4, 1, 1, False), prices(), FOUR)
    assert (found.mean, found.worst, found.ideal) == (7.0, 10.0, 4.0)
    assert found.waiting == pytest.approx(3 / 7) and found.over_ideal == 1.75


def test_one_group_shares_all_work_and_pays_for_the_exchange() -> None:
    found = price(Division(1, 4, 4, False), prices(exchange=0.2), FOUR)
    assert found.mean == pytest.approx(4 * CP_IMBALANCE + 0.1) and found.exchange == 0.2
    alone = price(Division(1, 4, 1, False), prices(exchange=0.2), FOUR)
    assert alone.exchange == pytest.approx(0.8), "every microbatch is exchanged"


def test_dealt_samples_of_a_step() -> None:
    costs = [[9.0, 1, 8, 2]]
    order = price(Division(2, 1, 1, False), prices(costs), FOUR)
    dealt = price(Division(2, 1, 1, True), prices(costs), FOUR)
    assert order.mean == 17 and dealt.mean == 10


def test_experts_over_replicas_make_every_microbatch_wait() -> None:
    lockstep = replace(FOUR, lockstep=True)
    costs = [[9.0, 1, 1, 9]]
    assert price(Division(2, 1, 1, False), prices(costs), FOUR).mean == 10
    assert price(Division(2, 1, 1, False), prices(costs), lockstep).mean == 18
    assert price(Division(2, 1, 1, True), prices(costs), lockstep).mean == 10


def test_what_does_not_fit_is_recomputed() -> None:
    small = replace(FOUR, max_tokens=60)
    whole, split = (price(Division(4 // n, n, 1, False), prices(), small) for n in (1, 2))
    assert whole.recomputed and not split.recomputed
    assert whole.mean == pytest.approx(7 * RECOMPUTED) and whole.ideal == 4.0


@given(
    costs=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    stages=st.integers(1, 5),
)
def test_a_pipeline_is_its_schedule(costs: list[int], stages: int) -> None:
    """Against a schedule that runs one event at a time."""
    held = np.array(costs, dtype=float)
    found = float(pipeline_seconds(held, stages))
    assert found == pytest.approx(one_by_one(costs, stages))
    equal = np.full(len(costs), 6.0)
    assert float(pipeline_seconds(equal, stages)) == pytest.approx(6 * (len(costs) + stages - 1))


def one_by_one(costs: list[int], stages: int) -> float:
    """1F1B: a stage prefers a backward that is ready, and holds at most stages - stage forwards."""
    count = len(costs)
    end: dict[tuple[str, int, int], float] = {}
    free = [0.0] * stages

    def ready(kind: str, stage: int, i: int) -> float | None:
        if kind == "F":
            return 0.0 if stage == 0 else end.get(("F", stage - 1, i))
        return end.get(("F", stage, i) if stage == stages - 1 else ("B", stage + 1, i))

    while len(end) < 2 * count * stages:
        for stage in range(stages):
            forwards = sum(("F", stage, i) in end for i in range(count))
            backwards = sum(("B", stage, i) in end for i in range(count))
            held = forwards - backwards
            kind, i = ("F", forwards) if held < stages - stage and forwards < count else (
                "B", backwards)  # fmt: skip
            when = ready(kind, stage, i) if i < count else None
            if when is not None:
                share = 1 / 3 if kind == "F" else 2 / 3
                free[stage] = max(free[stage], when) + costs[i] * share
                end[kind, stage, i] = free[stage]
    return max(free)


def test_divisions_keep_groups_inside_a_host() -> None:
    machine = Machine(gpus=32, gpus_per_node=8, model_gpus=2)
    found = [*divisions(machine, 32)]
    assert {d.cp_size for d in found} == {1, 2, 4}
    assert all(d.replicas * d.cp_size == 16 and d.joined in (1, d.cp_size) for d in found)
    assert len(found) == len({*found}) and Division(4, 4, 4, True) in found
    assert not any(d.dealt for d in divisions(Machine(4, 8, 1), 4) if d.replicas in (1, 4))
    assert Division(1, 4, 4, False).name == "DP 1 x CP 4, 4 joined"


def time_of(division: Division, mean: float, **more: Any) -> LayoutTime:
    usual = {"worst": mean, "ideal": 1.0, "waiting": 0.0, "exchange": 0.0, "recomputed": False}
    return LayoutTime(division, mean, **{**usual, **more})


def test_close_divisions_are_ranked_by_what_they_need() -> None:
    """Each is preferred to the one before, and all are within 2 % of the fastest."""
    ranked = [
        time_of(Division(2, 2, 2, True), 1.00, recomputed=True),
        time_of(Division(1, 4, 4, False), 1.01),
        time_of(Division(2, 2, 1, True), 1.01, exchange=0.2),
        time_of(Division(2, 2, 2, True), 1.015, exchange=0.1),
        time_of(Division(2, 2, 2, False), 1.018, exchange=0.1),
    ]
    for worse, better in pairwise(ranked):
        assert recommended([worse, better]) is better
    assert recommended([*ranked, time_of(Division(4, 1, 1, False), 1.03)]) is ranked[-1]


def test_nothing_to_gain_is_said_of_plain_data_parallelism_alone() -> None:
    assert has_nothing_to_gain([time_of(Division(4, 1, 1, False), 1.03)])
    assert not has_nothing_to_gain([time_of(Division(4, 1, 1, True), 1.0)])
    assert not has_nothing_to_gain([time_of(Division(4, 1, 1, False), 1.04)])
