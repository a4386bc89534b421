"""Parts of a table for FlexAttention: every cell in one of them, few slices in a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import masks
from megatron_magi.core.kernel import split_slices
from megatron_magi.core.kernel.flex_block_mask import BLOCK, block_kinds, strips_of
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.mask.mask import dense_from_slices


def check(mask: AttnMask, most: int) -> tuple[SliceTable, ...]:
    parts = split_slices.table_parts(SliceTable.of(mask))
    seen = np.zeros((mask.total_seqlen_q, mask.total_seqlen_k), dtype=int)
    for part in parts:
        assert (part.num_q, part.num_k) == seen.shape and part.slices.dtype == np.int32
        assert strips_of(part).most <= most
        seen += dense_from_slices(part.slices, *seen.shape)
    np.testing.assert_array_equal(seen, mask.to_dense().astype(int))
    return parts


@st.composite
def sparse_blocks(draw: st.DrawFn) -> AttnMask:
    """Random blocks of odd sizes, causal or not."""
    shape = draw(st.integers(1, 12)), draw(st.integers(1, 60))
    cells = np.random.default_rng(draw(st.integers(0, 99))).random(shape) < 0.6
    tall, causal = draw(st.integers(1, 150)), draw(st.booleans())
    if not causal:
        return masks.from_block_mask(cells, (tall, draw(st.integers(1, 9))))
    side = max(shape)
    square = np.zeros((side, side), dtype=bool)
    square[: shape[0], : shape[1]] = cells
    return masks.from_block_mask(square, draw(st.integers(1, 9)), causal=True)


@settings(max_examples=60, deadline=None)
@given(sparse_blocks(), st.sampled_from([1, 2, 5, 32]))
def test_parts_have_every_cell_once(mask: AttnMask, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_slices, "MOST_COMPARED", most)
        check(mask, most)


def test_few_slices_a_row_are_one_part_that_is_the_table() -> None:
    table = SliceTable.of(masks.causal(300))
    assert split_slices.table_parts(table) == (table,)
    assert table not in table.cache.values() and (table,) not in table.cache.values()


@pytest.mark.parametrize(("count", "wanted"), [(32, 1), (33, 2), (64, 2), (65, 3), (300, 10)])
def test_equal_rows_make_the_fewest_parts(count: int, wanted: int) -> None:
    mask = masks.from_block_mask(np.arange(2 * count)[None] % 2 == 0, (200, 5))
    assert len(check(mask, 32)) == wanted


def test_parts_are_made_once() -> None:
    table = SliceTable.of(masks.from_block_mask(np.arange(90)[None] % 2 == 0, (200, 5)))
    assert split_slices.table_parts(table) is split_slices.table_parts(table)


def test_parts_share_few_blocks() -> None:
    """Whole blocks stay whole, and few blocks are in a second part, where one ends or a slice is
    long."""
    cells = np.random.default_rng(0).random((16, 1024)) < 0.5
    cells[:, ::16] = True
    cells[3, 64:160] = True
    mask = masks.from_block_mask(cells, (64, 8))
    whole = block_kinds(SliceTable.of(mask))
    parts = [block_kinds(part) for part in split_slices.table_parts(SliceTable.of(mask))]
    assert len(parts) > 5 and (1024 * 8) % BLOCK == 0
    np.testing.assert_array_equal(np.sum([full for _, full in parts], axis=0), whole[1])
    visits = np.sum([partial | full for partial, full in parts], axis=0)
    assert visits.max() == 2 and visits.sum() < 1.2 * (visits > 0).sum()
