"""Measured costs: what is computed from times, and that ranks agree on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import megatron_magi as magi
from megatron_magi import CostTable, HeadShape, MagiConfig, masks
from megatron_magi.core.runtime.measure import calibration
from megatron_magi.core.runtime.measure.calibration import CPU_SIZES, measured_costs
from tests.process_pool import pool, subgroup

HEADS = HeadShape(4, 2, 16, bytes_per_element=4, head_dim_v=8)


def test_rates_follow_from_times(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1e-3, 2e-3])

    def seconds(run: Callable[[], object], device: torch.device) -> float:
        run()
        return next(times)

    monkeypatch.setattr(calibration, "least_seconds", seconds)
    given = MagiConfig(costs=CostTable(link_gib_s=33.0, tile_q=64))
    costs = measured_costs(None, HEADS, given, "cpu")
    visible = CPU_SIZES.tokens * (CPU_SIZES.tokens + 1) // 2
    flops = 3.5 * 2 * 4 * (16 + 8) * visible
    assert costs.kernel_tflops == pytest.approx(flops / 1e-3 / 1e12, rel=0.05)
    assert costs.memory_gib_s == pytest.approx(2 * CPU_SIZES.copied_mib / 1024 / 2e-3, rel=0.05)
    assert (costs.link_gib_s, costs.tile_q) == (33.0, 64), "one rank has no link"


def on_ranks(rank: int, size: int) -> Any:
    group = subgroup(size)
    if rank >= size:
        return None
    costs = measured_costs(group, HEADS, device="cpu")
    plan = magi.plan(masks.causal(64), group, HEADS, MagiConfig(costs=costs))
    magi.agree(plan, group)
    return costs


def test_ranks_agree_on_what_they_measured() -> None:
    first, *others = [costs for costs in pool(3).run(on_ranks, 3) if costs is not None]
    assert len(others) == 2 and all(costs == first for costs in others)
    assert first != CostTable() and first.link_gib_s > 0 and first.stage_latency_us > 0
    for name in ("link_gib_s", "kernel_tflops", "memory_gib_s", "stage_latency_us"):
        rate = getattr(first, name)
        assert rate == float(f"{rate:.2g}"), "two digits, so that runs have equal plans"


def test_the_median_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [{"link_gib_s": rate} for rate in (301.0, 17.0, 249.0)]

    def gather(into: list[Any], mine: Any, group: Any) -> None:
        into[:] = measured

    monkeypatch.setattr(calibration.dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(calibration.dist, "all_gather_object", gather)
    assert calibration._agreed(measured[0], object()) == {"link_gib_s": 250.0}  # type: ignore[arg-type]


def in_pairs(rank: int) -> Any:
    """Two context-parallel groups of two ranks each, which have equal plans."""
    world = subgroup(4)
    pairs = [torch.distributed.new_group(pair) for pair in ([0, 1], [2, 3])]
    return measured_costs(pairs[rank // 2], HEADS, device="cpu", agreeing=world)


def test_more_ranks_than_a_group_can_agree() -> None:
    first, *others = pool(4).run(in_pairs)
    assert len(others) == 3 and all(costs == first for costs in others)


def of_two_sizes(rank: int) -> None:
    world = subgroup(3)
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2])]
    if rank < 3:
        with pytest.raises(ValueError, match="ranks that agree must measure the same rates"):
            measured_costs(groups[rank // 2], HEADS, device="cpu", agreeing=world)


def test_groups_of_other_sizes_end_in_an_error_on_every_rank() -> None:
    pool(3).run(of_two_sizes)


def nodes_keep_their_links(rank: int, size: int) -> None:
    group = subgroup(size)
    if rank < size:
        given = CostTable(ranks_per_node=1, link_gib_s=77.0, stage_latency_us=5.0)
        costs = measured_costs(group, HEADS, MagiConfig(costs=given), "cpu")
        assert (costs.link_gib_s, costs.stage_latency_us) == (77.0, 5.0)


def test_links_among_nodes_are_kept() -> None:
    pool(3).run(nodes_keep_their_links, 2)


def test_other_inputs_are_refused() -> None:
    with pytest.raises(TypeError, match="head_shape"):
        measured_costs(None, (4, 2, 16))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config"):
        measured_costs(None, HEADS, CostTable())  # type: ignore[arg-type]
