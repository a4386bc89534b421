"""The forward work list against a dense mask: every visible cell once, every row once."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.core.mask import AttnMask, builders
from megatron_magi.core.native import solver
from tests.core.kernel.bwd_steps import dense

TILINGS = [(128, 128), (16, 128), (16, 176), (128, 176), (16, 64), (64, 64)]


def replay(work: dict, num_q: int, num_k: int, tile_q: int, tile_k: int) -> np.ndarray:
    """How often each cell is computed, by the rules the kernel follows; checks the rest."""
    count = np.zeros((num_q, num_k + tile_k), dtype=np.int32)
    written = np.zeros(num_q * work.num_parts, dtype=np.int32)
    for begin, end in work.empty_rows.tolist():
        assert begin < end
        written[begin:end] += 1
    steps = masked = 0
    for q0, tokens, entry_begin, num_entries, num_steps, out, *_ in work.tiles.tolist():
        assert 1 <= tokens <= tile_q and num_steps >= 1 and out % num_q == q0
        written[out : out + tokens] += 1
        entries = work.entries[entry_begin : entry_begin + num_entries].tolist()
        assert sum(e[1] for e in entries) == num_steps
        steps += num_steps
        rows = np.arange(q0, q0 + tokens)[:, None]
        for k_begin, tiles, full_begin, full_end, qs, qe, ks, ke, lo, hi, *_ in entries:
            assert 0 <= full_begin <= full_end <= tiles and k_begin >= 0
            masked += tiles - (full_end - full_begin)
            for j in range(tiles):
                key = k_begin + j * tile_k
                keys = np.arange(key, key + tile_k)[None, :]
                seen = (
                    (rows >= qs) & (rows < qe) & (keys >= ks) & (keys < ke)
                    & (keys - rows >= lo) & (keys - rows <= hi)
                )  # fmt: skip
                if full_begin <= j < full_end:
                    assert seen.all(), "a full tile has a hidden cell"
                assert seen.any(), "a tile nobody sees is visited"
                count[q0 : q0 + tokens, key : key + tile_k] += seen
    assert (written == 1).all(), "every row is written exactly once"
    assert steps == work.steps and masked == work.masked_steps
    order = work.tiles[:, 4]
    assert (np.diff(order) <= 0).all(), "longest first"
    assert not count[:, num_k:].any()
    return count[:, :num_k]


def check(slices: np.ndarray, num_q: int, num_k: int, tile_q: int, tile_k: int) -> dict:
    work = solver.fwd_work_list(slices, num_q, num_k, tile_q, tile_k)
    count = replay(work, num_q, num_k, tile_q, tile_k)
    np.testing.assert_array_equal(count, dense(slices, num_q, num_k))
    return work


@st.composite
def legal_masks(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Slices that share no cell: a grid of rectangles, each with its own band or dropped."""
    num_q, num_k = draw(st.integers(1, 420)), draw(st.integers(1, 420))
    cuts = lambda n: sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=4))})  # noqa: E731
    q_cuts, k_cuts = cuts(num_q), cuts(num_k)
    rows = []
    for q0, q1 in itertools.pairwise(q_cuts):
        for k0, k1 in itertools.pairwise(k_cuts):
            if draw(st.integers(0, 3)) == 0:
                continue
            lo_all, hi_all = k0 - (q1 - 1), (k1 - 1) - q0
            lo = draw(st.one_of(st.just(lo_all), st.integers(lo_all, hi_all)))
            hi = draw(st.one_of(st.just(hi_all), st.integers(lo, hi_all)))
            rows.append([q0, q1, k0, k1, lo, hi])
    slices = np.array(rows, dtype=np.int32).reshape(-1, 6)
    return solver.canonical_slices(slices), num_q, num_k


@settings(max_examples=60, deadline=None)
@given(legal_masks(), st.sampled_from(TILINGS), st.integers(1, 5))
def test_split_walks_cover_every_cell_once(
    mask: tuple[np.ndarray, int, int], tiling: tuple[int, int], max_steps: int
) -> None:
    slices, num_q, num_k = mask
    work = solver.fwd_work_list(slices, num_q, num_k, *tiling, max_steps)
    count = replay(work, num_q, num_k, *tiling)
    np.testing.assert_array_equal(count, dense(slices, num_q, num_k))
    assert all(row[4] <= max_steps for row in work.tiles.tolist())


@settings(max_examples=150, deadline=None)
@given(legal_masks(), st.sampled_from(TILINGS))
def test_every_cell_once(mask: tuple[np.ndarray, int, int], tiling: tuple[int, int]) -> None:
    check(*mask, *tiling)


NAMED: dict[str, AttnMask] = {
    "full": builders.full(300, 500),
    "causal": builders.causal(1000),
    "one_row": builders.full(1, 1),
    "packed_causal": builders.from_cu_seqlens([0, 5, 70, 71, 300, 428, 700], causal=True),
    "packed_full": builders.from_cu_seqlens([0, 64, 128, 192, 256, 320]),
    "window": builders.sliding_window(900, window_size=(255, 0)),
    "nothing": AttnMask(np.zeros((0, 6), np.int32), 200, 200),
    "rows_without_keys": AttnMask(np.array([[50, 60, 3, 9, -99, 99]], np.int32), 200, 20),
}


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_named_masks(name: str, tiling: tuple[int, int]) -> None:
    mask = NAMED[name]
    check(mask.slices, mask.total_seqlen_q, mask.total_seqlen_k, *tiling)


def test_regular_masks_cost_what_they_must() -> None:
    causal = solver.fwd_work_list(builders.causal(1024).slices, 1024, 1024, 128, 128)
    assert causal.steps == sum(range(1, 9)) and causal.masked_steps == 8
    full = solver.fwd_work_list(builders.full(1024, 1024).slices, 1024, 1024, 128, 128)
    assert full.steps == 64 and full.masked_steps == 0
    # A window of 1024 keys: 9 key tiles of a query tile, the first and the last cut.
    window = solver.fwd_work_list(
        builders.sliding_window(8192, window_size=(1023, 0)).slices, 8192, 8192, 128, 128
    )
    assert window.tiles[0, 4] == 9 and window.masked_steps <= 2 * 64


def test_slices_cut_along_keys_are_one_walk() -> None:
    whole = builders.causal(2048).slices
    parts = [solver.cut_slices(whole, 0, 2048, k, k + 300) for k in range(0, 2048, 300)]
    cut = solver.fwd_work_list(np.concatenate(parts), 2048, 2048, 128, 128)
    # Rows below a cut meet two slices that do not join there, so a few steps are extra.
    assert cut.steps <= 1.15 * sum(range(1, 17))
    check(np.concatenate(parts), 2048, 2048, 128, 128)


def test_short_rests_join_their_neighbours() -> None:
    # 130 rows of full attention to 64 keys, twice: 2 + 2 tiles apart, 3 when rests are joined.
    slices = np.array([[0, 130, 0, 64, -129, 63], [130, 260, 64, 128, -195, -3]], dtype=np.int32)
    work = check(slices, 260, 128, 128, 128)
    assert len(work.tiles) <= 4


@pytest.mark.parametrize(
    "lengths, tiling, steps",
    [
        ([101, 382, 398, 119, 361], (48, 80), 88),  # 96 by the ends of a tile alone
        ([526, 3666], (192, 128), 310),  # 329 by the next 16 tiles: the last one has few rows
        ([718, 3945], (192, 128), 367),  # 378 if a tile beyond the horizon counts as a whole
    ],
)
def test_a_tile_ends_where_all_tiles_cost_least(
    lengths: list[int], tiling: tuple[int, int], steps: int
) -> None:
    """What is not compared tile by tile is estimated well enough."""
    mask = builders.from_cu_seqlens([0, *itertools.accumulate(lengths)])
    total = sum(lengths)
    assert solver.fwd_work_list(mask.slices, total, total, *tiling).steps == steps


def test_outside_slices_are_refused() -> None:
    with pytest.raises(ValueError, match="slices must lie inside 100 queries x 50 keys"):
        solver.fwd_work_list(builders.full(100, 100).slices, 100, 50, 128, 128)


def test_building_is_cheap() -> None:
    rng = np.random.default_rng(0)
    ends = np.unique(np.r_[0, rng.integers(1, 65536, 60), 65536])
    mask = builders.from_cu_seqlens(ends.tolist(), causal=True)
    best = 1.0
    for _ in range(5):
        begin = time.perf_counter()
        solver.fwd_work_list(mask.slices, 65536, 65536, 128, 128)
        best = min(best, time.perf_counter() - begin)
    assert best < 0.02, f"{best * 1e3:.2f} ms"
