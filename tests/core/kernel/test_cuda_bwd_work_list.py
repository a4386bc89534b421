"""The backward's work list against a dense mask, its deterministic order against a simulation."""

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

TILE_Q = 64


def tile_k(head_dim: int) -> int:
    """Keys of a tile: heads wider than 192 leave room for half as many."""
    return 64 if head_dim > 192 else 128


@st.composite
def slice_grids(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Disjoint banded slices on a random grid of q and k ranges, and the two lengths."""
    num_q, num_k = draw(st.integers(1, 400)), draw(st.integers(1, 400))
    cuts_q = sorted({0, num_q, *draw(st.lists(st.integers(0, num_q), max_size=4))})
    cuts_k = sorted({0, num_k, *draw(st.lists(st.integers(0, num_k), max_size=4))})
    rows = []
    for q0, q1 in itertools.pairwise(cuts_q):
        for k0, k1 in itertools.pairwise(cuts_k):
            low, high = k0 - (q1 - 1), k1 - 1 - q0
            bounds = sorted(draw(st.tuples(st.integers(low, high), st.integers(low, high))))
            kind = draw(st.sampled_from(["none", "full", "band", "two bands"]))
            if kind == "full":
                rows.append((q0, q1, k0, k1, low, high))
            elif kind == "band":
                rows.append((q0, q1, k0, k1, *bounds))
            elif kind == "two bands":
                rows.append((q0, q1, k0, k1, low, bounds[0]))
                rows.append((q0, q1, k0, k1, bounds[0] + 1, high))
    return np.array(rows, dtype=np.int32).reshape(-1, 6), num_q, num_k


def dense(slices: np.ndarray, num_q: int, num_k: int) -> np.ndarray:
    q, k = np.arange(num_q)[:, None], np.arange(num_k)[None]
    count = np.zeros((num_q, num_k), dtype=np.int32)
    for q0, q1, k0, k1, lo, hi in slices.tolist():
        count += (q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= lo) & (k - q <= hi)
    return count


def steps_of(work: dict, item: np.ndarray) -> list[tuple[int, int]]:
    """(entry, first query row) of an item in walk order."""
    steps = []
    entries = range(item[2], item[3])
    for e in reversed(entries) if work.descending else entries:
        rows = list(range(work.entries[e][0], work.entries[e][1], TILE_Q))
        steps += [(e, q) for q in (reversed(rows) if work.descending else rows)]
    return steps


@settings(max_examples=150, deadline=None)
@given(slice_grids(), st.sampled_from([64, 96, 128, 192, 256]))
def test_every_cell_once_and_every_key_row_once(
    case: tuple[np.ndarray, int, int], head_dim: int
) -> None:
    slices, num_q, num_k = case
    work = solver.bwd_work_list(slices, num_q, num_k, head_dim=head_dim)
    seen = np.zeros((num_q, num_k), dtype=np.int32)
    written = np.zeros(num_k, dtype=np.int32)
    total = partial = 0
    for item in work.items.tolist():
        k_start, k_rows, _, _, steps = item[:5]
        assert 1 <= k_rows <= tile_k(head_dim)
        written[k_start : k_start + k_rows] += 1
        walk = steps_of(work, item)
        assert len(walk) == steps
        total += steps
        for e, q_tile in walk:
            q_begin, q_end, k_lo, k_hi, d_lo, d_hi = work.entries[e][:6].tolist()
            assert q_begin <= q_tile < q_end and k_start <= k_lo < k_hi <= k_start + k_rows
            box = np.array([[q_tile, min(q_tile + TILE_Q, q_end), k_lo, k_hi, d_lo, d_hi]])
            visible = dense(box, num_q, num_k)
            seen += visible
            partial += int(visible.sum()) < TILE_Q * k_rows
    assert (written == 1).all()
    np.testing.assert_array_equal(seen, dense(slices, num_q, num_k))
    assert (total, partial) == (work.steps, work.partial_steps)
    sizes = [int(item[4]) for item in work.items]
    assert work.grouped or sizes == sorted(sizes, reverse=True)


TWO, ENDS_FIRST, ENDS_SECOND, CONTINUES = 1, 2, 4, 8
"""Flags of a visit, as in csrc/attention/backward/visit.h."""


class Block:
    """One running item: ``halves`` threads add its steps in turns, each in its own order."""

    def __init__(self, walk: list[tuple[int, int]], visits: np.ndarray, halves: int) -> None:
        self.walk, self.visits = walk, visits.tolist()
        self.next = list(range(halves))
        self.added: set[int] = set()

    def is_done(self) -> bool:
        return len(self.added) == len(self.walk)

    def may_add(self, half: int, finished: list[int]) -> bool:
        """Whether the next step of a half has its turn, as in dq_in_order.cuh."""
        n = self.next[half]
        if n >= len(self.walk):
            return False
        group, first, second, flags = self.visits[n]
        if first and finished[group] != first:
            return False
        if flags & TWO and second and finished[group + 1] != second:
            return False
        return not (flags & CONTINUES) or all(m in self.added for m in range(n))

    def add(self, half: int, finished: list[int]) -> tuple[int, int]:
        n = self.next[half]
        group, _, _, flags = self.visits[n]
        entry = self.walk[n][0]
        if flags & ENDS_FIRST:
            finished[group] = entry + 1
        if flags & ENDS_SECOND:
            finished[group + 1] = entry + 1
        self.next[half] += len(self.next)
        self.added.add(n)
        return self.walk[n]


def run_in_any_order(
    work: solver.BwdWorkList, num_q: int, rng: random.Random, width: int, halves: int
) -> list[list[int]]:
    """Entries that add to each query row, in the order of a random legal execution.

    ``width`` items run at a time, started in list order. Of each, ``halves`` threads add every
    second step (head_dim 64) or all steps.
    """
    finished = [0] * work.num_row_groups
    order: list[list[int]] = [[] for _ in range(num_q)]
    ends = np.cumsum(work.items[:, 4])
    waiting = [
        Block(steps_of(work, item), part, halves)
        for item, part in zip(work.items.tolist(), np.split(work.visits(), ends[:-1]), strict=True)
    ]
    running: list[Block] = []
    while waiting or running:
        while waiting and len(running) < width:
            running.append(waiting.pop(0))
        running = [block for block in running if not block.is_done()]
        ready = [(b, h) for b in running for h in range(halves) if b.may_add(h, finished)]
        assert ready or not running, "every running item waits: a deadlock"
        if ready:
            block, half = rng.choice(ready)
            e, q = block.add(half, finished)
            for row in range(q, min(q + TILE_Q, work.entries[e][1])):
                order[row].append(e)
    return order


@settings(max_examples=80, deadline=None)
@given(
    slice_grids(),
    st.integers(0, 2**16),
    st.integers(1, 6),
    st.sampled_from([(128, 1), (256, 1), (64, 2)]),
)
def test_deterministic_order_is_kept_and_never_deadlocks(
    case: tuple[np.ndarray, int, int], seed: int, width: int, kernel: tuple[int, int]
) -> None:
    """Every row gets its sums in the order of the list, whoever runs when."""
    slices, num_q, num_k = case
    head_dim, halves = kernel
    work = solver.bwd_work_list(slices, num_q, num_k, head_dim=head_dim, deterministic=True)
    order = run_in_any_order(work, num_q, random.Random(seed), width, halves)
    in_list_order: list[list[int]] = [[] for _ in range(num_q)]
    for item in work.items.tolist():
        for e, q in steps_of(work, item):
            for row in range(q, min(q + TILE_Q, work.entries[e][1])):
                in_list_order[row].append(e)
    assert order == in_list_order


@settings(max_examples=80, deadline=None)
@given(slice_grids())
def test_every_entry_finishes_its_row_groups_once_and_in_the_order_of_the_list(
    case: tuple[np.ndarray, int, int],
) -> None:
    """The counter of a row group runs through the entries; each waits for the one before it."""
    slices, num_q, num_k = case
    work = solver.bwd_work_list(slices, num_q, num_k, deterministic=True)
    visits = iter(work.visits().tolist())
    finished = [0] * work.num_row_groups
    touched, ended = set(), []
    for item in work.items.tolist():
        for e, _ in steps_of(work, item):
            group, first, second, flags = next(visits)
            assert finished[group] == first != e + 1
            touched.add((e, group))
            if flags & TWO:
                assert finished[group + 1] == second != e + 1
                touched.add((e, group + 1))
            for i, flag in enumerate((ENDS_FIRST, ENDS_SECOND)):
                if flags & flag:
                    finished[group + i] = e + 1
                    ended.append((e, group + i))
    assert next(visits, None) is None
    assert sorted(touched) == sorted(ended)


def test_turns_of_a_million_tokens_are_few() -> None:
    """Their number is about that of the entries, not that of the 67 million steps."""
    for mask in (masks.causal(1 << 20), masks.sliding_window(1 << 20, (1 << 19, 0))):
        work = solver.bwd_work_list(mask.slices, 1 << 20, 1 << 20, 64, 8, deterministic=True)
        assert work.steps > 16 * len(work.entries)
        assert len(work.turns) < 4 * len(work.entries)


def test_deterministic_lists_have_tiles_of_the_kernel() -> None:
    with pytest.raises(ValueError, match="tile_q must be 64, got 32; leave it out"):
        solver.bwd_work_list(masks.full(64).slices, 64, 64, tile_q=32, deterministic=True)


def test_documents_start_their_own_tiles() -> None:
    mask = masks.from_cu_seqlens([0, 1000, 2300, 2310], causal=False)
    work = solver.bwd_work_list(mask.slices, 2310, 2310)
    # 8 x 16 and 11 x 21 tiles; the ten tokens at the end share the last tile of their neighbour.
    assert work.steps == 8 * 16 + 11 * 21 + 1
    assert len(work.items) == 8 + 11


def test_tiles_are_those_of_the_kernel_unless_others_are_asked_for() -> None:
    slices = masks.full(640).slices
    for head_dim, asked, items in ((128, None, 5), (192, None, 5), (256, None, 10), (256, 128, 5)):
        work = solver.bwd_work_list(slices, 640, 640, head_dim=head_dim, tile_k=asked)
        assert len(work.items) == items and work.steps == 10 * items


def test_branches_share_the_tiles_of_their_trunk() -> None:
    trunk, branches = 256, [10] * 20
    mask = masks.shared_question([trunk], [branches])
    work = solver.bwd_work_list(mask.slices, *mask.to_dense().shape)
    full = [e for e in work.entries.tolist() if e[0] == trunk]
    # All branches see both key tiles of the trunk: 200 rows are 4 query tiles, not 20.
    assert [e[1] - e[0] for e in full if e[3] <= trunk] == [200, 200]


def test_unseen_keys_are_items_without_steps() -> None:
    work = solver.bwd_work_list(np.array([[0, 10, 0, 10, -9, 9]], np.int32), 10, 300)
    assert sorted(work.items[:, 4].tolist()) == [0, 0, 1]


@pytest.mark.parametrize("length", [4096, 16384, 131072])
def test_deterministic_mode_mixes_heads_or_splits_within_its_memory(length: int) -> None:
    work = solver.bwd_work_list(
        masks.causal(length).slices, length, length, 64, 8, deterministic=True
    )
    assert work.num_splits * work.heads_per_section >= 2
    partial_bytes = 2 * 4 * work.num_splits * length * 8 * 128 * (work.num_splits > 1)
    assert partial_bytes < 1.2e9


def lanes(mask: AttnMask) -> int:
    """Kv heads and splits that run at a time in deterministic mode, of 64 query heads on 8."""
    tokens = mask.total_seqlen_q, mask.total_seqlen_k
    work = solver.bwd_work_list(mask.slices, *tokens, 64, 8, deterministic=True)
    assert work.num_splits * work.heads_per_section <= 8 * 8
    return work.num_splits * work.heads_per_section


def test_more_lanes_run_at_a_time_where_blocks_of_a_head_wait_longer() -> None:
    """All items of a prefix tree end with the last rows or begin with the first ones, and short
    ones follow long ones; rows of a long document are far apart soon."""
    parents = [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    tree = masks.prefix_tree([2048] + [1024] * 14, parents)
    assert lanes(tree) >= 4 * lanes(masks.causal(16384))
    assert lanes(masks.causal(2048)) > lanes(masks.causal(16384))


@pytest.mark.parametrize(
    ("branch", "count", "segments"), [(64, 1, 2), (64, 300, 301), (16, 300, 1)], ids=str
)
def test_branches_are_segments_unless_a_step_would_meet_three(
    branch: int, count: int, segments: int
) -> None:
    """Of 300, the trunk's waits are simulated without them, because they would be too many."""
    mask = masks.shared_question([16384], [[branch] * count])
    tokens = mask.total_seqlen_q, mask.total_seqlen_k
    work = solver.bwd_work_list(mask.slices, *tokens, 8, 2, deterministic=True)
    assert len(work.segments) == segments
    assert work.num_splits * work.heads_per_section >= 2


def test_a_single_head_has_a_schedule_in_deterministic_mode() -> None:
    """It has no second lane."""
    work = solver.bwd_work_list(masks.causal(1024).slices, 1024, 1024, 1, 1, deterministic=True)
    assert (work.num_splits, work.heads_per_section) == (1, 1)


def test_documents_stand_together_in_deterministic_mode_where_they_are_few() -> None:
    mask = masks.from_cu_seqlens([0, 6000, 10000, 16384])
    fast, ordered = (
        solver.bwd_work_list(mask.slices, 16384, 16384, 64, 8, deterministic=mode)
        for mode in (False, True)
    )
    ends = [ordered.entries[item[3] - 1][1] for item in ordered.items.tolist()]
    assert [key for key, _ in itertools.groupby(ends)] == [16384, 6000, 10000]
    assert ordered.grouped and ordered.heads_inner and fast.steps == ordered.steps


def test_few_items_split_the_group_and_many_do_not() -> None:
    def schedule(length: int) -> dict:
        mask = masks.full(length, length)
        return solver.bwd_work_list(mask.slices, length, length, 64, 8)

    assert schedule(256).num_splits > 1
    assert schedule(16384).num_splits == 1
    assert 8 % schedule(4096).heads_per_section == 0


@pytest.mark.parametrize(
    ("mask", "descending", "heads_inner"),
    [
        (masks.causal(2048), True, True),
        (masks.full(2048), True, True),
        (masks.from_cu_seqlens([0, 700, 1500, 2048]), True, True),
        (masks.sliding_window(4096, (300, 0)), True, False),
        (AttnMask(np.array([[0, 2048, 0, 2048, 0, 2047]], np.int32), 2048, 2048), False, True),
    ],
    ids=["causal", "full", "documents", "window", "inverse-causal"],
)
def test_walk_starts_neighbours_on_the_same_rows(
    mask: AttnMask, descending: bool, heads_inner: bool
) -> None:
    work = solver.bwd_work_list(
        mask.slices, mask.total_seqlen_q, mask.total_seqlen_k, deterministic=True
    )
    assert (work.descending, work.heads_inner) == (descending, heads_inner)


def test_causal_documents_stand_together_longest_first() -> None:
    bounds = [0, 700, 2900, 3500, 5200, 6000]
    work = solver.bwd_work_list(masks.from_cu_seqlens(bounds).slices, 6000, 6000, 64, 8)
    ends = [work.entries[item[3] - 1][1] for item in work.items.tolist()]
    documents = [key for key, _ in itertools.groupby(ends)]
    assert work.grouped and work.heads_inner
    # Documents by length; one key tile may straddle two of them and stands with the later one.
    assert documents == [2900, 5200, 6000, 700, 3500]
    steps = work.items[:, 4].tolist()
    for _, part in itertools.groupby(zip(ends, steps, strict=True), key=lambda pair: pair[0]):
        counts = [count for _, count in part]
        assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    "mask",
    [masks.causal(4096), masks.from_cu_seqlens([0, 700, 2900, 4096], causal=False)],
    ids=["one document", "full documents"],
)
def test_items_are_grouped_only_where_lengths_differ_in_a_group(mask: AttnMask) -> None:
    work = solver.bwd_work_list(mask.slices, 4096, 4096, 64, 8)
    assert not work.grouped and not work.heads_inner


@pytest.mark.parametrize("density", [0.05, 0.2, 0.5])
def test_scattered_blocks_are_not_grouped_by_where_they_end(density: float) -> None:
    """All of these groups would have nearly all rows, so items of one group would drift apart."""
    cells = np.random.default_rng(0).random((64, 64)) < density
    mask = masks.from_block_mask(cells, 128)
    work = solver.bwd_work_list(mask.slices, 8192, 8192, 64, 8)
    sizes = work.items[:, 4].tolist()
    assert not work.grouped and not work.heads_inner
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1.3 * sizes[-1]


def test_branches_of_a_prefix_tree_stand_together() -> None:
    """Their groups overlap a little: the trunk has the rows of all branches."""
    mask = masks.prefix_tree([1024] + [512] * 14, [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6])
    work = solver.bwd_work_list(mask.slices, 8192, 8192, 64, 8)
    assert work.grouped and work.heads_inner


def test_slices_outside_the_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must lie in 10 queries x 20 keys, got q .*; cut it"):
        solver.bwd_work_list(np.array([[0, 11, 0, 10, -9, 9]], np.int32), 10, 20)


@pytest.mark.parametrize("name", ["heads_q", "heads_kv", "num_sms", "tile_q", "tile_k"])
def test_counts_that_divide_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        solver.bwd_work_list(masks.causal(64).slices, 64, 64, **{name: 0})
