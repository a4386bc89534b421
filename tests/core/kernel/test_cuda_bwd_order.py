"""The backward's deterministic order against a simulation, and what its lists look like."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import masks
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.native import solver
from tests.core.kernel.bwd_order import (
    ADDERS,
    ALL_FLAGS,
    CONTINUES,
    ENDS_FIRST,
    ENDS_SECOND,
    TWO,
    in_list_order,
    run_in_any_order,
)
from tests.core.kernel.bwd_steps import slice_grids, steps_of


@settings(max_examples=80, deadline=None)
@given(
    slice_grids(),
    st.integers(0, 2**16),
    st.integers(1, 6),
    st.sampled_from(sorted(ADDERS)),
)
def test_deterministic_order_is_kept_and_never_deadlocks(
    case: tuple[np.ndarray, int, int], seed: int, width: int, head_dim: int
) -> None:
    """Every row gets its sums in the order of the list, whoever runs when."""
    slices, num_q, num_k = case
    work = solver.choose_bwd(slices, num_q, num_k, head_dim=head_dim, deterministic=True)
    order = run_in_any_order(work, work.visits(), num_q, random.Random(seed), width, head_dim)
    assert order == in_list_order(work, num_q)


@settings(max_examples=80, deadline=None)
@given(slice_grids())
def test_every_entry_finishes_its_row_groups_once_and_in_the_order_of_the_list(
    case: tuple[np.ndarray, int, int],
) -> None:
    """The counter of a row group runs through the entries; each waits for the one before it with
    the first step that meets the row group."""
    slices, num_q, num_k = case
    work = solver.choose_bwd(slices, num_q, num_k, deterministic=True)
    walks = [step for item in work.items.tolist() for step in steps_of(work, item)]
    finished = [0] * work.num_row_groups
    touched, ended = set(), []
    for (e, _), (group, *after, signal) in zip(walks, work.visits().tolist(), strict=True):
        assert signal // ALL_FLAGS == e + 1
        assert signal & TWO or after[1] == 0
        shared = [(e, group + i) in touched for i in range(2 if signal & TWO else 1)]
        assert any(shared) == bool(signal & CONTINUES)
        for i, was_met in enumerate(shared):
            assert after[i] == (0 if was_met else finished[group + i]) != e + 1
            touched.add((e, group + i))
        for i, flag in enumerate((ENDS_FIRST, ENDS_SECOND)):
            if signal & flag:
                finished[group + i] = e + 1
                ended.append((e, group + i))
    assert sorted(touched) == sorted(ended)


def test_two_warps_need_to_know_what_the_other_one_has_added() -> None:
    """Of two steps that share a row group, only the first waits for the entry before. If the other
    warp added the second one as soon as it could, it would at times come before its turn."""
    slices = np.array([[0, 300, 0, 128, -400, 400], [10, 300, 128, 256, -400, 400]], np.int32)
    work = solver.choose_bwd(slices, 300, 256, head_dim=64, deterministic=True)
    expected = in_list_order(work, 300)
    visits = work.visits()
    lonely = visits & [-1, -1, -1, ~CONTINUES]
    orders = [
        [run_in_any_order(work, v, 300, random.Random(seed), 2, 64) for seed in range(40)]
        for v in (visits, lonely)
    ]
    assert all(order == expected for order in orders[0])
    assert any(order != expected for order in orders[1])


def test_turns_of_a_million_tokens_are_few() -> None:
    """Their number is about that of the entries, not that of the 67 million steps."""
    for mask in (masks.causal(1 << 20), masks.sliding_window(1 << 20, (1 << 19, 0))):
        work = solver.choose_bwd(mask.slices, 1 << 20, 1 << 20, 64, 8, deterministic=True)
        assert work.steps > 16 * len(work.entries)
        assert len(work.turns) < 4 * len(work.entries)


def test_each_entry_follows_those_that_added_last_to_its_row_groups() -> None:
    """Of very many row groups, in walk order."""
    cells = np.random.default_rng(0).random((128, 128)) < 0.05
    mask, tokens = masks.from_block_mask(cells, 4096), 1 << 19
    work = solver.choose_bwd(mask.slices, tokens, tokens, 64, 8, deterministic=True)
    assert work.num_row_groups == tokens // 64
    last_added = np.zeros(work.num_row_groups, np.int32)
    for _, _, begin, end, *_ in work.items.tolist():
        for e in range(end - 1, begin - 1, -1) if work.descending else range(begin, end):
            first, last = (work.entries[e, :2] - [0, 1]) // 64
            before = last_added[first : last + 1]
            ends = np.append(np.flatnonzero(np.diff(before)), last - first)
            turns = work.turns[slice(*work.places[e, 2:])]
            np.testing.assert_array_equal(turns, np.stack([first + ends, before[ends]], 1))
            last_added[first : last + 1] = e + 1


def test_deterministic_lists_have_tiles_of_the_kernel() -> None:
    with pytest.raises(ValueError, match="tile_q must be 64, got 32; leave it out"):
        solver.choose_bwd(masks.full(64).slices, 64, 64, tile_q=32, deterministic=True)


@pytest.mark.parametrize("length", [4096, 16384, 131072])
def test_deterministic_mode_mixes_heads_or_splits_within_its_memory(length: int) -> None:
    work = solver.choose_bwd(masks.causal(length).slices, length, length, 64, 8, deterministic=True)
    assert work.lanes_per_section >= 2
    partial_bytes = 2 * 4 * work.num_splits * length * 8 * 128 * (work.num_splits > 1)
    assert partial_bytes < 1.2e9


def schedule(mask: AttnMask, head_dim: int = 128) -> tuple[int, int]:
    """Splits, and kv heads at a time, in deterministic mode, of 64 query heads on 8."""
    tokens = mask.total_seqlen_q, mask.total_seqlen_k
    work = solver.choose_bwd(mask.slices, *tokens, 64, 8, head_dim, deterministic=True)
    return work.num_splits, work.lanes_per_section // work.num_splits


def lanes(mask: AttnMask) -> int:
    """Kv heads and splits that run at a time."""
    splits, heads = schedule(mask)
    assert splits * heads <= 8 * 8
    return splits * heads


def test_more_lanes_run_at_a_time_where_blocks_of_a_head_wait_longer() -> None:
    """All items of a prefix tree end with the last rows or begin with the first ones, and short
    ones follow long ones; rows of a long document are far apart soon."""
    parents = [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    tree = masks.prefix_tree([512] + [256] * 14, parents)
    assert lanes(tree) >= 2 * lanes(masks.causal(4096))
    assert lanes(masks.causal(1024)) > lanes(masks.causal(16384))


@pytest.mark.parametrize("length", [4096, 16384, 65536])
def test_windows_run_two_lanes_at_a_time(length: int) -> None:
    """Their items hardly wait for each other, and splits cost a pass over partial sums."""
    assert schedule(masks.sliding_window(length, (1024, 0))) == (1, 2)


def test_even_documents_run_many_lanes_at_a_time_where_they_are_short() -> None:
    """All items of a document start on the same rows, one lag after the other."""
    short, long = (masks.from_cu_seqlens([0, n], causal=False) for n in (4096, 65536))
    assert lanes(short) >= 2 * lanes(long)


@pytest.mark.parametrize("length", [4096, 8192, 16384])
def test_wide_lanes_of_uneven_items_are_split(length: int) -> None:
    """They are at different rows, and a lane of all query heads of a kv head has too many bytes in
    each. Items of one length stay together."""
    assert schedule(masks.causal(length), 128)[0] > 1
    assert schedule(masks.causal(length), 192)[0] > 1
    assert schedule(masks.full(length), 128)[0] == 1


@pytest.mark.parametrize("length", [4096, 16384, 32768])
def test_few_lanes_of_head_dim_256_run_at_a_time(length: int) -> None:
    splits, heads = schedule(masks.causal(length), 256)
    assert 2 <= splits * heads <= 4


@pytest.mark.parametrize(
    ("branch", "count", "segments"), [(64, 1, 2), (64, 300, 301), (16, 300, 1)], ids=str
)
def test_branches_are_segments_unless_a_step_would_meet_three(
    branch: int, count: int, segments: int
) -> None:
    """Of 300, the trunk's waits are simulated without them, because they would be too many."""
    mask = masks.shared_question([16384], [[branch] * count])
    tokens = mask.total_seqlen_q, mask.total_seqlen_k
    work = solver.choose_bwd(mask.slices, *tokens, 8, 2, deterministic=True)
    assert len(work.segments) == segments
    assert work.lanes_per_section >= 2


def test_a_single_head_has_a_schedule_in_deterministic_mode() -> None:
    """It has no second lane."""
    work = solver.choose_bwd(masks.causal(1024).slices, 1024, 1024, 1, 1, deterministic=True)
    assert (work.num_splits, work.lanes_per_section) == (1, 1)


def test_documents_stand_together_in_deterministic_mode_where_they_are_few() -> None:
    mask = masks.from_cu_seqlens([0, 6000, 10000, 16384])
    fast, ordered = (
        solver.choose_bwd(mask.slices, 16384, 16384, 64, 8, deterministic=mode)
        for mode in (False, True)
    )
    ends = [ordered.entries[item[3] - 1][1] for item in ordered.items.tolist()]
    assert [key for key, _ in itertools.groupby(ends)] == [16384, 6000, 10000]
    assert ordered.grouped and ordered.heads_inner and fast.steps == ordered.steps
