"""The backward's work list over own and received keys: no tile holds keys of both."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import AttnMask, HeadShape, MagiConfig, masks
from megatron_magi.core.native import solver
from megatron_magi.core.plan import make_attn_plan
from megatron_magi.core.plan.travel import Travel, travel
from tests.core.kernel.bwd_order import in_list_order, run_in_any_order
from tests.core.kernel.bwd_steps import TILE_Q, dense, slice_grids, steps_of, tile_k

TRAVELS = st.tuples(st.integers(0, 20_000), st.integers(0, 20_000))
HEADS, NUM_SMS = (64, 8, 128), 132
STEP = 1.39 * NUM_SMS
"""Forward steps of the GPU during one of the backward on one processor (kernel_clock.cpp)."""


@dataclass(frozen=True)
class Times:
    """Of a launch, in steps of the backward on one processor."""

    starts: list[tuple[float, bool]]
    """Of each block, and whether its keys are received, in launch order."""
    end: float
    received_end: float


def simulated(work: solver.BwdWorkList, num_own: int, arrival: float = 0.0) -> Times:
    """Blocks start on the processor that is free first; those of received keys wait for them."""
    lanes, splits = work.lanes_per_section, work.num_splits
    sections = HEADS[1] * splits // lanes
    order = work.order.tolist() or range(sections * len(work.items))
    free, starts, ends = [0.0] * NUM_SMS, [], {False: [0.0], True: [0.0]}
    for place in order:
        item = work.items[place % len(work.items)]
        is_received = bool(item[0] >= num_own)
        steps = item[4] * (HEADS[0] // HEADS[1] // splits) + (4.5 if splits > 1 else 3.0)
        for _ in range(lanes):
            starts.append((free[0], is_received))
            end = max(free[0], arrival if is_received else 0.0) + steps
            heapq.heapreplace(free, end)
            ends[is_received].append(end)
    return Times(starts, max(max(x) for x in ends.values()), max(ends[True]))


def hidden(num_q: int) -> float:
    """Steps before the first block and after the last one (kernel_clock.cpp)."""
    return num_q * HEADS[0] / 64**2 / 2


def view(mask: AttnMask, rank: int, ranks: int = 2) -> tuple[np.ndarray, int, int, Travel]:
    """A rank's slices over [own keys | received keys], its tokens, all keys, and their travel."""
    shape, one = HeadShape(*HEADS), MagiConfig(overlap_degree=0, forward_mode="at_once")
    plan = make_attn_plan(mask, ranks, shape, one)
    (stage,) = plan.rank_plan(rank).stages
    received = stage.num_keys - stage.num_own
    return stage.slices, stage.num_own, stage.num_keys, travel(received, shape, one)


@settings(max_examples=150, deadline=None)
@given(slice_grids(), st.integers(0, 400), st.sampled_from([64, 128, 192, 256]), st.booleans())
def test_every_cell_once_and_no_tile_across_the_boundary(
    case: tuple[np.ndarray, int, int], boundary: int, head_dim: int, deterministic: bool
) -> None:
    slices, num_q, num_k = case
    num_own = min(boundary, num_k)
    work = solver.bwd_work_list(
        slices, num_q, num_k, head_dim=head_dim, deterministic=deterministic, num_own=num_own
    )
    seen = np.zeros((num_q, num_k), dtype=np.int32)
    keys = []
    for k_start, k_rows, *_ in work.items.tolist():
        assert 1 <= k_rows <= tile_k(head_dim)
        assert k_start >= num_own or k_start + k_rows <= num_own
        keys += range(k_start, k_start + k_rows)
    assert sorted(keys) == list(range(num_k))
    for item in work.items.tolist():
        for e, q in steps_of(work, item):
            _, q_end, k_lo, k_hi, d_lo, d_hi = work.entries[e][:6].tolist()
            box = np.array([[q, min(q + TILE_Q, q_end), k_lo, k_hi, d_lo, d_hi]])
            seen += dense(box, num_q, num_k)
    np.testing.assert_array_equal(seen, dense(slices, num_q, num_k))


@settings(max_examples=150, deadline=None)
@given(slice_grids(), st.integers(0, 400), TRAVELS, st.integers(1, 40))
def test_every_section_of_an_item_starts_once(
    case: tuple[np.ndarray, int, int], boundary: int, times: tuple[int, int], num_sms: int
) -> None:
    slices, num_q, num_k = case
    work = solver.bwd_work_list(
        slices, num_q, num_k, 64, 8, 128, num_sms, num_own=min(boundary, num_k), travel=times
    )
    count = len(work.items) * 8 * work.num_splits // work.lanes_per_section
    assert sorted(work.order.tolist()) in ([], list(range(count)))


@settings(max_examples=100, deadline=None)
@given(slice_grids(), st.integers(0, 3), st.booleans())
def test_without_travel_the_list_is_that_of_one_buffer(
    case: tuple[np.ndarray, int, int], tiles: int, deterministic: bool
) -> None:
    """Splits, heads and turns included, where no tile lies across the boundary."""
    slices, num_q, num_k = case
    numbers = num_q, num_k, 64, 8
    plain = solver.bwd_work_list(slices, *numbers, deterministic=deterministic)
    bounds = sorted(plain.items[:, 0].tolist())
    num_own = bounds[min(tiles, len(bounds) - 1)]
    work = solver.bwd_work_list(slices, *numbers, deterministic=deterministic, num_own=num_own)
    for name in ("items", "entries", "segments", "places", "turns", "order"):
        np.testing.assert_array_equal(getattr(work, name), getattr(plain, name))
    for name in ("num_splits", "lanes_per_section", "heads_inner", "descending", "grouped"):
        assert getattr(work, name) == getattr(plain, name)


@settings(max_examples=60, deadline=None)
@given(slice_grids(), st.integers(0, 400), TRAVELS, st.integers(0, 2**16), st.integers(1, 6))
def test_deterministic_order_is_kept_and_never_deadlocks(
    case: tuple[np.ndarray, int, int],
    boundary: int,
    times: tuple[int, int],
    seed: int,
    width: int,
) -> None:
    """All sections start their items in the order of the list, in which these add to dQ."""
    slices, num_q, num_k = case
    own = min(boundary, num_k)
    work = solver.bwd_work_list(
        slices, num_q, num_k, num_sms=2, deterministic=True, num_own=own, travel=times
    )
    assert len(work.order) == 0
    order = run_in_any_order(work, work.visits(), num_q, random.Random(seed), width, 128)
    assert order == in_list_order(work, num_q)


@pytest.mark.parametrize("deterministic", [False, True])
def test_own_tiles_start_until_rows_arrive(deterministic: bool) -> None:
    """Received tiles are the longest by a step and stand in front; nothing is lost by moving
    them."""
    rows = [[64, 4096, 0, 8192, -4095, 8127], [0, 4096, 8192, 12288, 4097, 12287]]
    slices, numbers = np.array(rows, np.int32), (4096, 12288, *HEADS, NUM_SMS)
    options = {"deterministic": deterministic, "num_own": 8192}
    plain = simulated(solver.bwd_work_list(slices, *numbers, **options), 8192)
    arrival = 0.02 * plain.end
    times = round((arrival + hidden(4096)) * STEP), 0
    work = solver.bwd_work_list(slices, *numbers, **options, travel=times)
    made = simulated(work, 8192, arrival)
    assert min(start for start, is_received in plain.starts if is_received) == 0.0
    assert min(start for start, is_received in made.starts if is_received) >= arrival
    assert made.end <= 1.01 * plain.end


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_leave_while_own_tiles_run(deterministic: bool) -> None:
    """In deterministic mode the head groups are split for that, which costs 1.5 steps a block."""
    mask = masks.full(4096, 8192)
    numbers = 4096, 8192, *HEADS, NUM_SMS
    options = {"deterministic": deterministic, "num_own": 4096}
    plain = simulated(solver.bwd_work_list(mask.slices, *numbers, **options), 4096)
    departure = 0.1 * plain.end
    times = 0, round((departure + hidden(4096)) * STEP)
    work = solver.bwd_work_list(mask.slices, *numbers, **options, travel=times)
    made = simulated(work, 4096)
    assert plain.received_end > plain.end - departure
    bound = 1.02 if deterministic else 1.01
    assert max(made.end, made.received_end + departure) <= bound * plain.end


@pytest.mark.parametrize("tokens", [4096, 8192, 16384])
@pytest.mark.parametrize("name", ["packed", "causal", "full", "window"])
def test_a_launch_is_hardly_longer_than_on_one_buffer(name: str, tokens: int) -> None:
    """When rows arrive as predicted, and the return of gradients counts too."""
    rng = np.random.default_rng(tokens)
    ends = np.minimum(np.cumsum(rng.lognormal(7.1, 1.1, 200).astype(int) + 1), 2 * tokens)
    mask = {
        "packed": masks.from_cu_seqlens([0, *np.unique(ends).tolist()]),
        "causal": masks.causal(2 * tokens),
        "full": masks.full(2 * tokens),
        "window": masks.from_cu_seqlens([0, 2 * tokens], window_size=(1024, 0)),
    }[name]
    for rank in range(2):
        slices, num_own, num_k, times = view(mask, rank)
        numbers = num_own, num_k, *HEADS, NUM_SMS
        plain = simulated(solver.bwd_work_list(slices, *numbers), num_own)
        work = solver.bwd_work_list(slices, *numbers, num_own=num_own, travel=times)
        arrival, departure = (max(0.0, x / STEP - hidden(num_own)) for x in times)
        made = simulated(work, num_own, arrival)
        assert made.end <= 1.01 * plain.end
        returned = max(plain.end, plain.received_end + departure)
        assert max(made.end, made.received_end + departure) <= 1.01 * returned


@pytest.mark.parametrize("num_own", [0, 700])
def test_received_keys_only_and_received_keys_that_nobody_sees(num_own: int) -> None:
    rows = np.array([[0, 300, 0, 700, -299, 699]], np.int32)
    work = solver.bwd_work_list(rows, 300, 1000, num_own=num_own, travel=(2000, 4000))
    received = work.items[work.items[:, 0] >= num_own]
    assert received[:, 1].sum() == 1000 - num_own
    assert len(work.items) - len(received) == (0 if num_own == 0 else 6)
    assert (received[:, 4] == 0).all() == (num_own == 700)


@pytest.mark.parametrize("num_own", [-1, 21])
def test_a_boundary_outside_the_keys_is_refused(num_own: int) -> None:
    rows = np.array([[0, 10, 0, 10, -9, 9]], np.int32)
    with pytest.raises(ValueError, match=f"num_own must be between 0 and the 20.*got {num_own}"):
        solver.bwd_work_list(rows, 10, 20, num_own=num_own)
