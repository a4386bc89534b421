"""Ranks get equal predicted kernel times (csrc/planner/time_balance.h, schedule/kernel_clock.h)."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import AttnMask, CostTable, HeadShape, MagiConfig, masks
from megatron_magi.core.native import solver
from megatron_magi.core.plan import AttnPlan, make_attn_plan
from megatron_magi.core.plan.kernel_clock import timing

HEADS = HeadShape(64, 8, 128)
BY_TIME, BY_TILES = MagiConfig(), MagiConfig(costs=CostTable(num_sms=0))
FOUND = timing(HEADS, BY_TIME)
assert FOUND is not None
CLOCK, ROW_TIME = FOUND


def packed(seed: int, total: int) -> AttnMask:
    """Causal documents of mixed lengths; every third mask is a window besides."""
    rng = np.random.default_rng(seed)
    ends = [0]
    while ends[-1] < total:
        ends.append(min(total, ends[-1] + int(rng.lognormal(7.1, 1.1)) + 1))
    if seed % 3 == 0:
        return masks.from_cu_seqlens(ends, window_size=(700, 0))
    return masks.from_cu_seqlens(ends)


def times(plan: AttnPlan) -> np.ndarray:
    return plan.layout.native.rank_times(plan.mask.slices, CLOCK)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cp_size=st.sampled_from([2, 3, 4, 8]),
    local=st.sampled_from([1000, 2048, 4096, 8192]),
    nodes=st.sampled_from([None, 2]),
)
def test_never_slower_than_by_tiles(seed: int, cp_size: int, local: int, nodes: int | None) -> None:
    if nodes is not None and cp_size % nodes:
        nodes = None
    mask = packed(seed, cp_size * local)
    config, tiles = (MagiConfig(costs=CostTable(num_sms=n, ranks_per_node=nodes)) for n in (132, 0))
    plan, usual = (make_attn_plan(mask, cp_size, HEADS, c) for c in (config, tiles))
    mine, theirs = times(plan), times(usual)
    assert mine.max() <= theirs.max()
    assert sorted(plan.layout.permutation().tolist()) == list(range(plan.layout.padded_seqlen))
    assert plan.layout.num_local_tokens == usual.layout.num_local_tokens
    # What is shown is what was minimised: the mask's tiles in proportion to the times.
    if plan.layout.chunk_size == usual.layout.chunk_size:  # a tile ends where a chunk does
        assert plan.loads.sum() == usual.loads.sum()
    share = mine / mine.sum() * plan.loads.sum()
    assert np.abs(plan.loads - share).max() <= 1
    # Rows that are received besides cost less than what the slowest rank gains.
    predicted = timing(HEADS, config)
    assert predicted is not None
    more = (plan.rows_received.sum() - usual.rows_received.sum()) // cp_size
    assert more * predicted.row_time / 2 <= theirs.max() - mine.max()
    again = make_attn_plan(mask, cp_size, HEADS, config)
    assert again == plan and np.array_equal(again.layout.chunk_ranks, plan.layout.chunk_ranks)


@pytest.mark.parametrize(
    "cp_size, local, most", [(2, 8192, 1.015), (2, 16384, 1.01), (8, 16384, 1.02)]
)
def test_packs_are_balanced_in_time(cp_size: int, local: int, most: float) -> None:
    """By tiles, most of these packs end above."""
    by_time, by_tiles = [], []
    for seed in range(1, 9):
        mask = packed(3 * seed + 1, cp_size * local)
        for config, ratios in ((BY_TIME, by_time), (BY_TILES, by_tiles)):
            found = times(make_attn_plan(mask, cp_size, HEADS, config))
            ratios.append(found.max() / found.mean())
    assert max(by_time) <= most < max(by_tiles)


def test_a_given_chunk_size_is_kept() -> None:
    mask = packed(1, 4 * 8192)
    plan = make_attn_plan(mask, 4, HEADS, MagiConfig(chunk_size=1024))
    assert plan.layout.chunk_size == 1024


def test_a_given_layout_is_timed_as_it_is() -> None:
    mask, window = packed(1, 4 * 4096), masks.sliding_window(4 * 4096, (512, 0))
    first = make_attn_plan(mask, 4, HEADS, BY_TIME)
    second = make_attn_plan(window, 4, HEADS, BY_TIME, layout=first.layout)
    assert second.layout is first.layout
    found = times(second)
    assert np.abs(second.loads - found / found.sum() * second.loads.sum()).max() <= 1


def launch_end(steps: list[int], splits: int, sections: int, at_a_time: int) -> float:
    """Blocks in launch order, each on the processor that is free first."""
    free = [0.0] * 132
    for _ in range(sections):
        for count in steps:
            for _ in range(at_a_time * splits):
                cost = count * (8 // splits) + (3.0 if splits == 1 else 6.0)
                heapq.heapreplace(free, free[0] + cost)
    return max(free)


@pytest.mark.parametrize("seed", range(4))
def test_the_backward_is_simulated(seed: int) -> None:
    """Processors that are always free together stand for one: the end is the same."""
    mask, num_rows = packed(seed, 8192), 8192
    items = solver.bwd_work_list(mask.slices, num_rows, num_rows, 64, 8, 128).items
    steps = items[:, 4].tolist()
    wanted = min(launch_end(steps, splits, 2, 4) for splits in (1, 2))
    rows = num_rows * 64 / (64 * 64)
    assert CLOCK.backward_steps(mask.slices, num_rows, num_rows) == wanted + rows


def test_the_forward_is_that_of_the_widest_variant() -> None:
    mask = packed(5, 8192)
    chosen = solver.choose_fwd(mask.slices, 8192, 8192, 64, 8, 128, 132)
    assert (chosen.pack, chosen.block_m) == (8, 192)
    found = CLOCK.forward_steps(mask.slices, 8192, 8192)
    assert chosen.cost <= found <= 1.05 * chosen.cost


@pytest.mark.parametrize("head_dim", [8, 80, 96, 128, 192, 256, 300])
def test_any_head_dim_has_a_time(head_dim: int) -> None:
    """Kernels are compiled for five widths; others are padded, or counted as the widest."""
    mask = masks.causal(1024)
    times_of = [
        solver.KernelClock(4, 2, dim, 132).time(mask.slices, 1024, 1024)
        for dim in (head_dim, min(d for d in (64, 96, 128, 192, 256, 300) if d >= head_dim))
    ]
    assert times_of[0] == times_of[1] > 0
