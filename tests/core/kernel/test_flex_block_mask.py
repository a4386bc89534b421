"""FlexAttention's block masks against dense masks, cell by cell and block by block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_magi import masks
from megatron_magi.core.kernel import flex_block_mask
from megatron_magi.core.kernel.flex_block_mask import (
    BLOCK,
    block_kinds,
    empty_rows,
    strips_of,
    visible_cells,
)
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.mask import AttnMask

CPU = torch.device("cpu")


def check_blocks(mask: AttnMask) -> None:
    dense = mask.to_dense()
    partial, full = block_kinds(SliceTable.of(mask))
    for i, j in np.ndindex(partial.shape):
        block = dense[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        assert (partial | full)[i, j] == block.any()
        assert not full[i, j] or (block.all() and block.shape == (BLOCK, BLOCK))
        assert not (partial & full)[i, j]


def check_cells(mask: AttnMask) -> None:
    """Also behind the last row and the last key, where lengths are rounded up."""
    table, dense = SliceTable.of(mask), mask.to_dense()
    q = torch.arange(flex_block_mask.rounded(table.num_q))[:, None]
    k = torch.arange(flex_block_mask.rounded(table.num_k))
    nothing = torch.tensor(0)
    want = np.zeros((len(q), len(k)), dtype=bool)
    want[: table.num_q, : table.num_k] = dense
    seen = visible_cells(table, CPU)(nothing, nothing, q, k)
    np.testing.assert_array_equal(seen.broadcast_to(want.shape).numpy(), want)
    empty = empty_rows(table, CPU)
    if dense.any(1).all():
        assert empty is None
    else:
        np.testing.assert_array_equal(empty.numpy()[:, 0], ~dense.any(1))


@st.composite
def any_mask(draw: st.DrawFn) -> AttnMask:
    """Rectangles of a random grid, each with a random band."""
    edges = st.lists(st.integers(1, 150), min_size=1, max_size=4).map(lambda x: np.cumsum([0, *x]))
    q, k = draw(edges), draw(edges)
    slices = []
    for i, j in np.ndindex(len(q) - 1, len(k) - 1):
        if draw(st.booleans()):
            low, high = k[j] - q[i + 1], k[j + 1] - q[i]
            d_lo = draw(st.integers(low, high))
            slices.append((q[i], q[i + 1], k[j], k[j + 1], d_lo, draw(st.integers(d_lo, high))))
    return AttnMask(np.array(slices, np.int32).reshape(-1, 6), int(q[-1]), int(k[-1]))


@settings(max_examples=60, deadline=None)
@given(any_mask())
@example(masks.full(200, 300))
@example(masks.from_cu_seqlens([0, 5, 133, 134, 300]))
def test_cells_and_blocks_are_the_dense_mask(mask: AttnMask) -> None:
    check_blocks(mask)
    check_cells(mask)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33])
def test_many_slices_meet_a_row(count: int) -> None:
    """Columns two keys apart, the even ones from row 3 on, with bands that cut some rows off."""
    slices = [[3 * (i % 2), 40, 2 * i, 2 * i + 1, i - 20, 2 * i] for i in range(count)]
    mask = AttnMask(np.array(slices, np.int32), 45, 2 * count)
    assert strips_of(SliceTable.of(mask)).most <= count
    check_cells(mask)
    check_blocks(mask)


def test_the_intervals_have_one_of_few_shapes() -> None:
    """What a compiled kernel reads has a size that hardly changes with the slices."""

    def shape(count: int, least: int) -> torch.Size:
        ends = masks.from_block_mask(np.arange(2 * count)[None] % 2 == 0, (100, 5))
        test = visible_cells(SliceTable.of(ends), CPU, least)
        held = [cell.cell_contents for cell in test.__closure__ or ()]
        first, last = (x for x in held if isinstance(x, torch.Tensor))
        assert first.shape == last.shape
        return first.shape

    assert shape(5, 1) == shape(8, 1) == (8, flex_block_mask.rounded(100))
    assert shape(5, 32) == shape(17, 1) == shape(32, 1) == (32, flex_block_mask.rounded(100))


@pytest.mark.parametrize("count", [1, 127, 128, 129, 4096, 4097, 8191, 8192, 8193, 100_001])
def test_lengths_are_rounded_to_few(count: int) -> None:
    length = flex_block_mask.rounded(count)
    assert length % BLOCK == 0 and count <= length <= max(count + BLOCK - 1, count * 9 // 8)
    octave = {flex_block_mask.rounded(n) for n in range(length + 1, 2 * length, BLOCK)}
    assert len(octave) <= 16


def test_a_block_that_just_fits_its_band_is_full() -> None:
    for low, high, is_full in ((-127, 127, True), (-126, 127, False), (-127, 126, False)):
        table = SliceTable(np.array([[0, 128, 0, 128, low, high]], np.int32), 128, 128)
        partial, full = block_kinds(table)
        assert (partial.tolist(), full.tolist()) == ([[not is_full]], [[is_full]])
        assert partial.shape == (1, 1)
