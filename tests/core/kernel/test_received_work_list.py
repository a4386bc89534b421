"""The backward's work list over own and received keys: no tile holds keys of both."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import masks
from megatron_magi.core.native import solver
from tests.core.kernel.test_cuda_bwd_work_list import (
    TILE_Q,
    dense,
    run_in_any_order,
    slice_grids,
    steps_of,
    tile_k,
)


def parts_of(work: solver.BwdWorkList) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Items of own keys in front, of received keys, and of own keys behind."""
    front, end = work.front_items, work.front_items + work.received_items
    return work.items[:front], work.items[front:end], work.items[end:]


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
    front, received, behind = parts_of(work)
    assert all(item[0] >= num_own for item in received)
    assert all(item[0] < num_own for item in itertools.chain(front, behind))


@settings(max_examples=150, deadline=None)
@given(slice_grids(), st.integers(0, 400))
def test_a_part_keeps_the_order_and_the_short_items_stand_behind(
    case: tuple[np.ndarray, int, int], boundary: int
) -> None:
    slices, num_q, num_k = case
    num_own = min(boundary, num_k)
    work = solver.bwd_work_list(slices, num_q, num_k, num_own=num_own)
    front, received, behind = (items[:, 4].tolist() for items in parts_of(work))
    own = sum(front) + sum(behind)
    if work.received_items == 0:
        assert behind == []
    else:
        assert sum(behind) <= min(0.3 * work.steps, 0.4 * own)
        room = min(0.3 * work.steps, 0.4 * own) - sum(behind)
        assert not front or front[-1] > room, "as many as there is room for"
    if not work.grouped:
        for steps in (front + behind, received):
            assert steps == sorted(steps, reverse=True)


@settings(max_examples=60, deadline=None)
@given(slice_grids(), st.integers(0, 400), st.integers(0, 2**16), st.integers(1, 6))
def test_deterministic_order_is_kept_and_never_deadlocks(
    case: tuple[np.ndarray, int, int], boundary: int, seed: int, width: int
) -> None:
    slices, num_q, num_k = case
    work = solver.bwd_work_list(
        slices, num_q, num_k, deterministic=True, num_own=min(boundary, num_k)
    )
    once = run_in_any_order(work, num_q, seed, width)
    assert once == run_in_any_order(work, num_q, seed + 1, width)


@pytest.mark.parametrize("num_own", [None, 8192])
def test_a_list_without_received_keys_is_in_one_part(num_own: int | None) -> None:
    mask = masks.causal(8192)
    plain = solver.bwd_work_list(mask.slices, 8192, 8192, 64, 8)
    work = solver.bwd_work_list(mask.slices, 8192, 8192, 64, 8, num_own=num_own)
    assert (work.front_items, work.received_items) == (64, 0)
    np.testing.assert_array_equal(work.items, plain.items)
    assert (work.num_splits, work.heads_per_section) == (plain.num_splits, plain.heads_per_section)


def test_own_work_is_on_both_sides_of_the_received() -> None:
    """Half of the keys are received: three tenths and two tenths of the work are own."""
    mask = masks.full(4096, 8192)
    work = solver.bwd_work_list(mask.slices, 4096, 8192, 64, 8, num_own=4096)
    front, received, behind = (items[:, 4].sum() for items in parts_of(work))
    assert received == work.steps / 2
    assert front == pytest.approx(0.3 * work.steps, rel=0.1)
    assert behind == pytest.approx(0.2 * work.steps, rel=0.1)


@pytest.mark.parametrize("num_own", [0, 700])
def test_received_keys_only_and_received_keys_that_nobody_sees(num_own: int) -> None:
    rows = np.array([[0, 300, 0, 700, -299, 699]], np.int32)
    work = solver.bwd_work_list(rows, 300, 1000, num_own=num_own)
    front, received, behind = parts_of(work)
    assert received[:, 1].sum() == 1000 - num_own
    assert len(front) + len(behind) == (0 if num_own == 0 else 6)
    assert (received[:, 4] == 0).all() == (num_own == 700)


@pytest.mark.parametrize("num_own", [-1, 21])
def test_a_boundary_outside_the_keys_is_refused(num_own: int) -> None:
    rows = np.array([[0, 10, 0, 10, -9, 9]], np.int32)
    with pytest.raises(ValueError, match=f"num_own must be between 0 and the 20.*got {num_own}"):
        solver.bwd_work_list(rows, 10, 20, num_own=num_own)
