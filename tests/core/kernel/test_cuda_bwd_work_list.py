"""The backward's work list against a dense mask."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import masks
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.native import solver
from tests.core.kernel.bwd_steps import TILE_Q, dense, slice_grids, steps_of, tile_k


@settings(max_examples=150, deadline=None)
@given(slice_grids(), st.sampled_from([64, 96, 128, 192, 256]))
def test_every_cell_once_and_every_key_row_once(
    case: tuple[np.ndarray, int, int], head_dim: int
) -> None:
    slices, num_q, num_k = case
    work = solver.choose_bwd(slices, num_q, num_k, head_dim=head_dim)
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


def test_documents_start_their_own_tiles() -> None:
    mask = masks.from_cu_seqlens([0, 1000, 2300, 2310], causal=False)
    work = solver.choose_bwd(mask.slices, 2310, 2310)
    # 8 x 16 and 11 x 21 tiles; the ten tokens at the end share the last tile of their neighbour.
    assert work.steps == 8 * 16 + 11 * 21 + 1
    assert len(work.items) == 8 + 11


def test_tiles_are_those_of_the_kernel_unless_others_are_asked_for() -> None:
    slices = masks.full(640).slices
    for head_dim, asked, items in ((128, None, 5), (192, None, 5), (256, None, 10), (256, 128, 5)):
        work = solver.choose_bwd(slices, 640, 640, head_dim=head_dim, tile_k=asked)
        assert len(work.items) == items and work.steps == 10 * items


def test_branches_share_the_tiles_of_their_trunk() -> None:
    trunk, branches = 256, [10] * 20
    mask = masks.shared_question([trunk], [branches])
    work = solver.choose_bwd(mask.slices, *mask.to_dense().shape)
    full = [e for e in work.entries.tolist() if e[0] == trunk]
    # All branches see both key tiles of the trunk: 200 rows are 4 query tiles, not 20.
    assert [e[1] - e[0] for e in full if e[3] <= trunk] == [200, 200]


def test_unseen_keys_are_items_without_steps() -> None:
    work = solver.choose_bwd(np.array([[0, 10, 0, 10, -9, 9]], np.int32), 10, 300)
    assert sorted(work.items[:, 4].tolist()) == [0, 0, 1]


def test_few_items_split_the_group_and_many_do_not() -> None:
    def schedule(length: int) -> dict:
        mask = masks.full(length, length)
        return solver.choose_bwd(mask.slices, length, length, 64, 8)

    assert schedule(256).num_splits > 1
    made = schedule(4096)
    assert made.num_splits == 1 and 8 % made.lanes_per_section == 0


@pytest.mark.parametrize(
    ("mask", "heads", "deterministic", "chosen"),
    [
        (masks.causal(65536), (64, 8, 128), False, (4, 1)),
        (masks.causal(65536), (16, 1, 128), False, (8, 1)),
        (masks.causal(65536), (16, 4, 128), False, (4, 4)),
        (masks.causal(131072), (8, 8, 256), False, (1, 1)),
        (masks.causal(65536), (16, 1, 256), False, (16, 1)),
        (masks.full(65536), (64, 8, 64), False, (8, 1)),
        (masks.full(65536), (32, 8, 64), False, (4, 1)),
        (masks.full(131072), (64, 8, 128), False, (8, 1)),
        (masks.sliding_window(262144, (1023, 0)), (32, 32, 64), True, (1, 2)),
        (masks.causal(1 << 20), (64, 8, 128), False, (8, 1)),
    ],
)
def test_much_work_is_scheduled_as_if_it_were_simulated(
    mask: AttnMask, heads: tuple[int, int, int], deterministic: bool, chosen: tuple[int, int]
) -> None:
    """Where no order could change the end, nothing is simulated; these are a simulation's."""
    tokens = mask.total_seqlen_q, mask.total_seqlen_k
    work = solver.choose_bwd(mask.slices, *tokens, *heads, deterministic=deterministic)
    assert (work.num_splits, work.lanes_per_section) == chosen


def test_wide_heads_share_the_cache_with_few_others() -> None:
    """At head_dim 256 tiles of 64 keys move twice the bytes for a product."""
    mask = masks.from_cu_seqlens([*range(0, 8001, 1000), 16384])
    narrow, wide = (
        solver.choose_bwd(mask.slices, 16384, 16384, 64, 8, head_dim) for head_dim in (128, 256)
    )
    heads = [work.lanes_per_section // work.num_splits for work in (wide, narrow)]
    assert heads[0] == 1 < heads[1]


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
    work = solver.choose_bwd(
        mask.slices, mask.total_seqlen_q, mask.total_seqlen_k, deterministic=True
    )
    assert (work.descending, work.heads_inner) == (descending, heads_inner)


def test_unseen_keys_come_last_also_in_groups() -> None:
    """Blocks without steps would otherwise start before the longest ones."""
    documents = masks.from_cu_seqlens([0, 700, 2900, 3500, 5200, 6000])
    mask = AttnMask(documents.slices, 6000, 6600)
    work = solver.choose_bwd(mask.slices, 6000, 6600, 64, 8)
    steps = work.items[:, 4] > 0
    assert work.grouped and not steps[-1]
    assert steps[: steps.sum()].all()


def test_causal_documents_stand_together_longest_first() -> None:
    bounds = [0, 700, 2900, 3500, 5200, 6000]
    work = solver.choose_bwd(masks.from_cu_seqlens(bounds).slices, 6000, 6000, 64, 8)
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
    work = solver.choose_bwd(mask.slices, 4096, 4096, 64, 8)
    assert not work.grouped and not work.heads_inner


@pytest.mark.parametrize("density", [0.05, 0.2, 0.5])
def test_scattered_blocks_are_not_grouped_by_where_they_end(density: float) -> None:
    """All of these groups would have nearly all rows, so items of one group would drift apart."""
    cells = np.random.default_rng(0).random((64, 64)) < density
    mask = masks.from_block_mask(cells, 128)
    work = solver.choose_bwd(mask.slices, 8192, 8192, 64, 8)
    sizes = work.items[:, 4].tolist()
    assert not work.grouped and not work.heads_inner
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1.3 * sizes[-1]


def blocks(tokens: int) -> AttnMask:
    """Random ones of 128 tokens, a fifth of them visible."""
    cells = np.random.default_rng(0).random((tokens // 128, tokens // 128)) < 0.2
    return masks.from_block_mask(cells, 128)


@pytest.mark.parametrize(
    ("tokens", "heads_kv", "chosen"), [(16384, 8, (2, 1)), (65536, 8, (4, 1)), (16384, 64, (1, 1))]
)
def test_scattered_blocks_run_one_lane_at_a_time(
    tokens: int, heads_kv: int, chosen: tuple[int, int]
) -> None:
    """Short blocks of one lane stay on the same rows; splits run one after another."""
    mask = blocks(tokens)
    work = solver.choose_bwd(mask.slices, tokens, tokens, 64, heads_kv)
    assert (work.num_splits, work.lanes_per_section) == chosen


def test_scattered_blocks_that_the_cache_holds_run_all_lanes() -> None:
    mask = blocks(2048)
    assert solver.choose_bwd(mask.slices, 2048, 2048, 64, 8).lanes_per_section > 1


def test_branches_of_a_prefix_tree_stand_together() -> None:
    """Their groups overlap a little: the trunk has the rows of all branches."""
    mask = masks.prefix_tree([1024] + [512] * 14, [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6])
    work = solver.choose_bwd(mask.slices, 8192, 8192, 64, 8)
    assert work.grouped and work.heads_inner


def test_slices_outside_the_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must lie in 10 queries x 20 keys, got q .*; cut it"):
        solver.choose_bwd(np.array([[0, 11, 0, 10, -9, 9]], np.int32), 10, 20)


@pytest.mark.parametrize("name", ["heads_q", "heads_kv", "num_sms", "tile_q", "tile_k"])
def test_counts_that_divide_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        solver.choose_bwd(masks.causal(64).slices, 64, 64, **{name: 0})
