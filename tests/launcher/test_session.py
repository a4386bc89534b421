"""What the hooks of one run share: plans that are remembered, and figures of a step."""

from __future__ import annotations

import pytest
from megatron.core import parallel_state

from megatron_magi import HeadShape, masks
from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.config import ForwardMode, MagiConfig
from megatron_magi.core.plan import make_attn_plan
from megatron_magi.launcher import session as module
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.session import NUM_RECENT, LauncherState, StepStats
from tests.knobs import magi_config
from tests.launcher.one_rank import launch_of


def test_a_step_without_plans_has_means_of_0() -> None:
    assert StepStats().means() == {
        "magi imbalance": 0.0,
        "magi key rows received": 0.0,
        "magi plan ms": 0.0,
    }


def test_means_are_over_microbatches() -> None:
    means = StepStats(num_plans=4, imbalance=5.0, received=2.0, plan_ms=12.0).means()
    assert [*means.values()] == [1.25, 0.5, 3.0]


@pytest.mark.parametrize("size, group", [(1, None), (2, "the group")])
def test_one_rank_has_no_group(
    size: int, group: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: size)
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: "the group")
    assert LauncherState(LauncherOptions(MagiConfig())).cp_group() == group


@pytest.mark.usefixtures("alone")
def test_equal_microbatches_share_what_was_planned() -> None:
    launch = launch_of(8)
    first = launch.plan([0, 3, 8])
    assert launch.plan([0, 3, 8]) is first
    assert launch.plan([0, 4, 8]) is not first
    full = launch.plan([0, 3, 8], masks.full(8))
    assert full is not first and full.token_plan.mask.area() == 64
    assert launch.plan([0, 3, 8], masks.full(8)) is full, "masks are compared by what they hold"
    assert launch.plan([0, 3, 8]) is first


@pytest.mark.usefixtures("alone")
def test_the_microbatch_that_was_not_used_for_longest_is_forgotten() -> None:
    launch = launch_of(64)
    first, second = launch.plan([0, 1, 64]), launch.plan([0, 2, 64])
    for bound in range(3, NUM_RECENT + 1):
        launch.plan([0, bound, 64])
    assert launch.plan([0, 1, 64]) is first, "all of them are remembered"
    launch.plan([0, 63, 64])
    assert len(launch._recent) == NUM_RECENT
    assert launch.plan([0, 1, 64]) is first and launch.plan([0, 2, 64]) is not second


@pytest.mark.usefixtures("alone")
def test_plans_are_made_with_the_options() -> None:
    launch = launch_of(8)
    launch.options = LauncherOptions(MagiConfig(chunk_size=2))
    plan = launch.plan([0, 8]).token_plan
    assert plan.config.chunk_size == 2 and plan.head_shape.num_heads_q == 2


@pytest.mark.parametrize("forward_mode", ["at_once", "staged"])
def test_what_a_plan_costs_is_counted(
    forward_mode: ForwardMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the rank that has the later half of a causal stream, and receives the other's keys."""
    config = magi_config(chunk_size=32, tile_q=4, tile_k=4, forward_mode=forward_mode)
    plan = make_attn_plan(masks.causal(64), 2, HeadShape(2, 2, 4), config)
    rank = int(plan.rows_received.argmax())
    assert plan.rows_received[rank] == 32 and plan.imbalance > 1
    times = iter([10.0, 10.25, 20.0, 20.5])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: rank)
    packed = MagiPackedSeqParams(plan=plan)
    monkeypatch.setattr(module, "make_packed_seq_params", lambda *given, **more: packed)
    launch = launch_of(64)
    for _ in range(2):
        assert launch.plan([0, 64]) is packed
    assert launch.take_stats() == pytest.approx({
        "magi imbalance": plan.imbalance,
        "magi key rows received": 0.5,
        "magi plan ms": 375.0,
    })  # fmt: skip
    assert launch.take_stats() == StepStats().means(), "counted from the last time on"
