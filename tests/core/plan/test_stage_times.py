"""Predicted times: the documented formulas, the planner's choice, and what the reports show."""

from __future__ import annotations

import json
from typing import get_args

import numpy as np
import pytest

from megatron_magi import AttnMask, HeadShape, masks
from megatron_magi.cli import main
from megatron_magi.config import ForwardMode
from megatron_magi.core.plan import AttnPlan, make_attn_plan, predict_times
from megatron_magi.core.plan.stage_costs import stage_costs
from tests.knobs import magi_config

HEADS = HeadShape(32, 8, 128)
MODES: tuple[ForwardMode, ...] = get_args(ForwardMode)
DEGREES = range(5)
PACKED = masks.from_cu_seqlens([0, *range(3000, 65536, 3000), 65536])
CASES = {
    "packed": (PACKED, 8, {}),
    "causal": (masks.causal(2**17), 8, {}),
    "slow_link": (masks.causal(2**16), 4, {"link_gib_s": 25.0}),
    "free_calls": (PACKED, 3, {"link_gib_s": 25.0, "stage_latency_us": 0.0}),
    "window": (masks.sliding_window(2**16, (4096, 0)), 8, {"memory_gib_s": 100.0}),
    "no_exchange": (masks.from_cu_seqlens([*range(0, 65537, 8192)]), 8, {}),
    "one_rank": (PACKED, 1, {}),
    "kept": (masks.causal(2**16), 4, {"link_gib_s": 25.0, "keep_received_keys": True}),
}
all_cases = pytest.mark.parametrize("mask, cp_size, costs", CASES.values(), ids=CASES)


def planned(
    mask: AttnMask,
    cp_size: int,
    costs: dict[str, float],
    degree: int | None = None,
    mode: ForwardMode | None = None,
) -> AttnPlan:
    config = magi_config(overlap_degree=degree, forward_mode=mode, **costs)
    return make_attn_plan(mask, cp_size, HEADS, config)


def documented(plan: AttnPlan) -> tuple[float, float]:
    """Forward and backward of the slowest rank in microseconds, by docs/design/planner.md."""
    c = stage_costs(plan.head_shape, plan.config, plan.layout.num_local_tokens)
    work = plan.layout.native.rank_work(plan.mask.slices, plan.loads, plan.rows_received)
    n, parts = plan.overlap_degree, max(plan.overlap_degree, 1)
    ends = []
    for own_tiles, remote_tiles, local_tiles, rows in work.tolist():
        own, remote, local = (t * c.tile_ps for t in (own_tiles, remote_tiles, local_tiles))

        def exchange(row_ps: int, parts: int, rows: int = rows) -> int:
            return rows * row_ps // parts + c.exchange_ps if rows else 0

        everything, part = exchange(c.row_ps, 1), exchange(c.row_ps, parts)
        if plan.forward_mode == "local_first":
            forward = max(everything, local) + own + remote - local + c.call_ps
        elif plan.forward_mode == "at_once" or n == 0:
            forward = everything + own + remote
        else:
            forward = max(part, own) + (n - 1) * max(part, remote // n) + remote // n
            forward += n * c.call_ps + (n + 1) * c.pass_ps
        part = 0 if plan.config.keep_received_keys else part  # again, for the backward
        home = exchange(c.grad_row_ps, parts)
        own, remote = (t * c.tile_ps // 2 * 5 for t in (own_tiles, remote_tiles))
        backward = max(part, c.pass_ps)
        if n == 0:
            backward += own + remote + home
        else:
            travelling = [part * (i < n - 1) + home * (i > 0) for i in range(n)]
            backward += sum(max(remote // n, t) for t in travelling) + max(own, home)
            backward += n * 4 * c.call_ps + (n - 1) * ((own + remote) * 3 // 100)
        ends.append((forward / 1e6, backward / 1e6))
    forwards, backwards = zip(*ends, strict=True)
    return max(forwards), max(backwards)


@all_cases
def test_predicted_times_are_the_documented_ones(
    mask: AttnMask, cp_size: int, costs: dict[str, float]
) -> None:
    for degree in DEGREES:
        for mode in MODES:
            plan = planned(mask, cp_size, costs, degree, mode)
            times = predict_times(plan)
            assert (times.forward_us, times.backward_us) == pytest.approx(documented(plan))


@all_cases
def test_the_planner_chooses_the_least_predicted_time(
    mask: AttnMask, cp_size: int, costs: dict[str, float]
) -> None:
    def total(plan: AttnPlan) -> float:
        times = predict_times(plan)
        return times.forward_us + times.backward_us

    given = [planned(mask, cp_size, costs, d, m) for d in DEGREES for m in MODES]
    assert total(planned(mask, cp_size, costs)) == pytest.approx(min(map(total, given)), rel=1e-12)
    for degree in DEGREES:
        mine = [p for p in given if p.overlap_degree == degree]
        chosen = planned(mask, cp_size, costs, degree)
        assert total(chosen) == pytest.approx(min(map(total, mine)), rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("degree", [0, 1, 3])
def test_a_stage_waits_for_its_rows_and_for_the_stage_before(
    degree: int, mode: ForwardMode
) -> None:
    times = predict_times(planned(PACKED, 4, {"link_gib_s": 25.0}, degree, mode))
    stages = {"at_once": 1, "local_first": 2, "staged": degree + 1}[mode]
    assert times.forward.shape == (4, stages, 4) and times.backward.shape == (4,)
    receive_start, receive_end, compute_start, compute_end = np.moveaxis(times.forward, 2, 0)
    assert (receive_start <= receive_end).all() and (receive_end <= compute_start).all()
    assert (compute_start <= compute_end).all()
    assert (compute_end[:, :-1] <= compute_start[:, 1:]).all()
    assert (receive_end[:, :-1] <= receive_start[:, 1:]).all()
    assert (compute_end[:, :-2] <= receive_start[:, 2:]).all(), "two buffers are alive"
    assert 0 <= times.exposed_share <= 1
    if stages == 1:
        assert times.exposed_share == pytest.approx(1)


def test_nothing_is_exposed_where_nothing_travels() -> None:
    assert predict_times(planned(PACKED, 1, {})).exposed_share == 0


@pytest.mark.parametrize("options", [
    ["--lengths", "30000,500x8", "--cp", "4"],
    ["--lengths", "16384", "--cp", "2", "--overlap-degree", "2", "--forward-mode", "staged"],
])  # fmt: skip
def test_the_report_shows_the_predicted_times(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_magi.cli import plan as report

    plans: list[AttnPlan] = []
    make_plan = report.make_plan
    monkeypatch.setattr(
        report, "make_plan", lambda g, **layout: plans.append(make_plan(g, **layout)) or plans[-1]
    )
    assert main(["plan", *options, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["plan"]
    times = predict_times(plans[0])
    assert (shown["model_forward_us"], shown["model_backward_us"]) == (
        times.forward_us, times.backward_us)  # fmt: skip
    assert shown["model_exposed_share"] == times.exposed_share
    assert main(["plan", *options]) == 0
    (line,) = [t for t in capsys.readouterr().out.splitlines() if t.startswith("model")]
    assert f"forward {times.forward_us:.0f} us" in line
    assert f"backward {times.backward_us:.0f} us" in line
