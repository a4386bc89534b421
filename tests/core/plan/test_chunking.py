"""LPT and the chunk size against their definitions in docs/design/planner.md."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import AttnMask, HeadShape, MagiConfig, masks
from megatron_magi.core.plan import TokenLayout, make_attn_plan, num_local_tokens
from megatron_magi.core.plan.token_layout import LOAD_CAPS, choose_token_layout
from tests.dense import random_mask
from tests.knobs import magi_config, with_trials

HEADS = HeadShape(8, 2, 64)
BORDER_ROWS = 128
OVER_CAP = Fraction(120, 100)


def tiles_per_chunk(mask: AttnMask, plan: TokenLayout, config: MagiConfig) -> list[int]:
    """Key blocks in which a row of a query tile sees a key, summed over the chunk's tiles."""
    rows = np.zeros((plan.padded_seqlen, mask.total_seqlen_k), bool)
    rows[: mask.total_seqlen_q] = mask.to_dense()
    in_chunk = np.arange(0, plan.chunk_size, config.costs.tile_q)
    tile_starts = np.arange(0, len(rows), plan.chunk_size)[:, None] + in_chunk
    seen = np.logical_or.reduceat(rows, tile_starts.reshape(-1), axis=0)
    tiles = np.logical_or.reduceat(seen, np.arange(0, rows.shape[1], config.costs.tile_k), axis=1)
    per_chunk: list[int] = tiles.sum(1).reshape(tile_starts.shape).sum(1).tolist()
    return per_chunk


def longest_first(loads: list[int], cp_size: int) -> list[int]:
    """Rank of every chunk: heaviest chunk first, to the least loaded rank that has room."""
    ranks, held, counts = [0] * len(loads), [0] * cp_size, [0] * cp_size
    for chunk in sorted(range(len(loads)), key=lambda c: (-loads[c], c)):
        open_ranks = [r for r in range(cp_size) if counts[r] < len(loads) // cp_size]
        rank = min(open_ranks, key=lambda r: (held[r], r))
        ranks[chunk] = rank
        held[rank] += loads[chunk]
        counts[rank] += 1
    return ranks


def candidates(local: int, tile_q: int) -> list[int]:
    """Chunk sizes that give a rank at most 64 chunks: whole tiles if those reach 8 chunks."""
    sizes = [local // n for n in range(1, min(64, local) + 1) if local % n == 0]
    tiled = [size for size in sizes if size % tile_q == 0]
    return tiled if any(local // size >= 8 for size in tiled) else sizes


def price(mask: AttnMask, cp_size: int, config: MagiConfig, size: int) -> Fraction:
    """Tiles of the fullest rank under LPT, with what chunk borders and a missed cap cost."""
    local = num_local_tokens(mask.total_seqlen_q, cp_size, config)
    plan = TokenLayout(
        mask.total_seqlen_q, size, cp_size, np.arange(local // size * cp_size) % cp_size
    )
    loads = tiles_per_chunk(mask, plan, config)
    ranks = longest_first(loads, cp_size)
    highest = max(
        sum(t for t, r in zip(loads, ranks, strict=True) if r == k) for k in range(cp_size)
    )
    cap = (
        Fraction(round((config.max_imbalance or LOAD_CAPS[0]) * 10**6), 10**6)
        * sum(loads)
        / cp_size
    )
    return highest * (1 + Fraction(BORDER_ROWS, size)) * (OVER_CAP if highest > cap else 1)


MASKS = dict(
    seed=st.integers(0, 2**31),
    cp_size=st.integers(1, 4),
    local=st.sampled_from([1, 6, 12, 16, 24, 48, 60, 96]),
    short=st.integers(0, 3),
    tile=st.sampled_from([1, 2, 4, 8]),
    max_imbalance=st.sampled_from([1.0, 1.01, 1.1, 1.5]),
)


def problem(
    seed: int, cp_size: int, local: int, short: int, tile: int, max_imbalance: float
) -> tuple[AttnMask, int, MagiConfig]:
    total = max(1, local * cp_size - short)
    config = magi_config(swap_trials=0, tile_q=tile, tile_k=tile, max_imbalance=max_imbalance)
    return random_mask(seed, total, total, max_slices=8), cp_size, config


@given(**MASKS)
@settings(max_examples=100, deadline=None)
def test_lpt_is_longest_first(**given: float) -> None:
    mask, cp_size, config = problem(**given)
    plan = choose_token_layout(mask, cp_size, config)
    want = longest_first(tiles_per_chunk(mask, plan, config), cp_size)
    assert plan.chunk_ranks.tolist() == want


@given(**MASKS)
@settings(max_examples=100, deadline=None)
def test_the_chunk_size_is_the_cheapest(**given: float) -> None:
    """By the formula of docs/design/planner.md, up to the rounding of its integers."""
    mask, cp_size, config = problem(**given)
    plan = choose_token_layout(mask, cp_size, config)
    sizes = candidates(num_local_tokens(mask.total_seqlen_q, cp_size, config), config.costs.tile_q)
    prices = {size: price(mask, cp_size, config, size) for size in sizes}
    assert prices[plan.chunk_size] <= min(prices.values()) * Fraction(1001, 1000)


@given(**MASKS)
@settings(max_examples=100, deadline=None)
def test_the_chosen_size_keeps_the_promised_local_length(**given: float) -> None:
    mask, cp_size, config = problem(**given)
    config = with_trials(config, None)
    plan = choose_token_layout(mask, cp_size, config)
    assert plan.num_local_tokens == num_local_tokens(mask.total_seqlen_q, cp_size, config)


@pytest.mark.parametrize("swap_trials", [0, None])
@pytest.mark.parametrize("seed", range(10))
def test_sizes_that_are_no_whole_tiles_are_tried_between(
    seed: int, swap_trials: int | None
) -> None:
    """Sizes 384, 192, 128: tiles of chunks of 192 once stood for 128, 512 rows came for 384."""
    ends = np.random.default_rng(seed).integers(1, 8 * 384, 5).tolist()
    mask = masks.from_cu_seqlens([0, *sorted(set(ends)), 8 * 384])
    plan = make_attn_plan(mask, 8, HEADS, magi_config(swap_trials=swap_trials))
    assert plan.layout.num_local_tokens == 384
    assert plan.loads.sum() == sum(tiles_per_chunk(mask, plan.layout, plan.config))


def test_without_work_chunks_are_as_large_as_they_can_be() -> None:
    """All sizes cost the same then: nothing."""
    nothing = AttnMask(np.zeros((0, 6), np.int32), 4096, 4096)
    assert choose_token_layout(nothing, 4, magi_config()).chunk_size == 1024


def test_chunk_borders_fall_on_document_borders_where_that_balances() -> None:
    """Each rank gets one document of 512 rows, one of the idle tails, and nothing from elsewhere.

    Chunks of 1024 leave two ranks idle; chunks of 256 balance as well and cost more borders.
    """
    documents = masks.from_cu_seqlens([0, 512, 1024, 1536, 2048])
    mask = AttnMask(documents.slices, 4096, 4096)
    plan = make_attn_plan(mask, 4, HEADS, magi_config())
    assert plan.layout.chunk_size == 512
    assert plan.imbalance == 1.0
    assert plan.rows_received.sum() == 0


def full_document(rows: int, total: int) -> AttnMask:
    """A document in which all see all, then rows that see nothing."""
    return AttnMask(masks.full(rows).slices, total, total)


def test_up_to_64_chunks_on_a_rank() -> None:
    """Eight tile rows with work on eight ranks: only chunks of one tile give each rank one."""
    plan = make_attn_plan(full_document(8 * 128, 8 * 8192), 8, HEADS, magi_config())
    assert plan.layout.chunk_size == 128
    assert plan.imbalance == 1.0


def test_few_whole_tiles_leave_other_sizes_to_try() -> None:
    """Three tiles on a rank: halves of the document balance, whole tiles of 128 or 384 do not."""
    plan = make_attn_plan(full_document(384, 768), 2, HEADS, magi_config())
    assert plan.layout.chunk_size == 192
    assert plan.imbalance == 1.0


def test_trades_that_reach_the_cap_spare_small_chunks() -> None:
    """Where LPT misses the cap a little, the search keeps chunks that LPT has to cut in half."""
    larger = 0
    for seed in range(10):
        ends = np.random.default_rng(seed).integers(1, 4 * 8192, 12).tolist()
        mask = masks.from_cu_seqlens([0, *sorted(set(ends)), 4 * 8192])
        lpt, swap = (
            make_attn_plan(mask, 4, HEADS, magi_config(swap_trials=trials)) for trials in (0, None)
        )
        assert swap.imbalance <= 1.01
        assert swap.layout.chunk_size >= lpt.layout.chunk_size
        larger += swap.layout.chunk_size > lpt.layout.chunk_size
    assert larger >= 5
