"""Zigzag per document: what Megatron's packed path does, against dense masks and the planner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import AttnMask, HeadShape, masks
from megatron_magi.core.plan import TokenLayout, make_attn_plan
from megatron_magi.viz.document_zigzag import DocumentZigzag
from tests.knobs import magi_config

HEADS = HeadShape(4, 2, 64)


@st.composite
def packed_masks(draw: st.DrawFn) -> AttnMask:
    """Documents of 1 to 90 tokens, padding behind some, under every rule."""
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=6))
    rule = draw(st.sampled_from([{}, {"causal": False}, {"window_size": (9, 0)},
                                 {"window_size": (3, 5), "causal": False}]))  # fmt: skip
    behind = draw(st.integers(0, 20))
    return masks.from_cu_seqlens(
        np.cumsum([0, *lengths]), total_seqlen=sum(lengths) + behind, **rule
    )


def layout(mask: AttnMask, cp_size: int) -> DocumentZigzag:
    made = DocumentZigzag.of(mask, cp_size)
    assert made is not None
    return made


@settings(max_examples=60, deadline=None)
@given(mask=packed_masks(), cp_size=st.integers(1, 5))
def test_every_row_has_one_owner_and_documents_are_cut_alike(mask: AttnMask, cp_size: int) -> None:
    made = layout(mask, cp_size)
    rows = [made.rows(rank) for rank in range(cp_size)]
    assert {len(r) for r in rows} == {made.num_local_tokens}
    flat = np.concatenate(rows)
    assert np.array_equal(np.sort(flat[flat >= 0]), np.arange(mask.total_seqlen_q))
    assert (flat < 0).sum() == made.padding_tokens
    for start, end in zip(made.starts[:-1], made.starts[1:], strict=True):
        piece = -(-(end - start) // (2 * cp_size))
        for rank, mine in enumerate(rows):
            pieces = set((mine[(mine >= start) & (mine < end)] - start) // piece)
            assert pieces <= {rank, 2 * cp_size - 1 - rank}


@settings(max_examples=60, deadline=None)
@given(mask=packed_masks(), cp_size=st.integers(1, 5), tile=st.sampled_from([4, 16, 128]))
def test_loads_and_needs_are_those_of_the_dense_mask(
    mask: AttnMask, cp_size: int, tile: int
) -> None:
    made, dense = layout(mask, cp_size), mask.to_dense()
    blocks = np.arange(mask.total_seqlen_k) // tile
    for rank in range(cp_size):
        rows = made.rows(rank)
        seen = dense[rows] & (rows >= 0)[:, None]
        read = set(np.flatnonzero(seen.any(axis=0))) - set(rows)
        assert made.rows_needed()[rank] == len(read)
        tiles = [
            len(set(blocks[seen[i : i + tile].any(axis=0)])) for i in range(0, len(rows), tile)
        ]
        assert made.loads(tile, tile)[rank] == sum(tiles)


def test_loads_are_counted_as_the_planner_counts_them() -> None:
    """The rows in the order of their ranks, keys as they are, one chunk a rank."""
    mask, cp_size = masks.from_cu_seqlens([0, 300, 2000, 4096]), 4
    made = layout(mask, cp_size)
    per_rank, total = made.num_local_tokens, cp_size * made.num_local_tokens
    slices = []
    for rank in range(cp_size):
        for start, end, local, document in made.runs(rank).tolist():
            begin, stop = made.starts[document : document + 2].tolist()
            at = rank * per_rank + local
            slices.append([at, at + end - start, begin, stop, -total, start - at])
    moved = AttnMask(np.array(slices), total, total)
    tokens = TokenLayout(total, per_rank, cp_size, np.arange(cp_size))
    config = magi_config()
    want = make_attn_plan(moved, cp_size, HEADS, config, layout=tokens).loads
    assert made.loads(config.costs.tile_q, config.costs.tile_k).tolist() == want.tolist()


def test_one_document_is_zigzagged_as_the_sequence_is() -> None:
    made = layout(masks.causal(64), 4)
    assert made.rows(1).tolist() == [*range(8, 16), *range(48, 56)]
    assert made.padding_tokens == 0


def test_padding_is_that_of_every_document() -> None:
    made = layout(masks.from_cu_seqlens([0, 1, 9, 20]), 4)  # to 8, 8 and 16 rows
    assert made.padding_tokens == 7 + 0 + 5 and made.num_local_tokens == 8
    assert made.rows(0).tolist() == [0, -1, 1, 8, 9, 10, -1, -1]


@pytest.mark.parametrize("mask", [
    masks.global_and_window([0, 64], (7, 0), 6),
    masks.prefix_lm([0, 30, 64], [5, 9]),
    masks.block_causal([[24, 24], [16]]),
    masks.shared_question([16], [[8, 12]]),
    masks.from_ranges([[0, 32]], [[32, 64]], [0], total_seqlen_q=64),
    masks.from_ranges([[0, 32], [32, 64]], [[0, 32], [32, 64]], [0, 1], total_seqlen_q=64),
    AttnMask(np.zeros((0, 6), np.int32), 64, 64),
], ids=["global", "prefix", "video", "question", "other keys", "two rules", "empty"])  # fmt: skip
def test_other_masks_have_none(mask: AttnMask) -> None:
    assert DocumentZigzag.of(mask, 2) is None


def test_a_window_longer_than_a_document_is_still_one_rule() -> None:
    mask = masks.from_cu_seqlens([0, 3, 40, 64], window_size=(7, 0))
    assert DocumentZigzag.of(mask, 2) is not None
