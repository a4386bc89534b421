"""Slices as FlexAttention's BlockMask, without a dense mask in between.

Rows are cut into strips that the same slices cover. The test of a cell inside a partial block
compares its key with the slices of its row one by one, so ``slice_parts`` keeps their number small.
Shapes: T query rows, R intervals.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.mask.slices import IntArray

BLOCK = 128
"""Side of a block of the block mask, FlexAttention's default."""

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Blocks = npt.NDArray[np.bool_]
Index = npt.NDArray[np.int64]


class Strips(NamedTuple):
    """Strip s is the rows ``bounds[s]`` to ``bounds[s + 1]``, and the slices ``offsets[s]`` to
    ``offsets[s + 1]`` cover them."""

    bounds: Index
    """int64 [strips + 1]."""
    slices: Index
    """int64 [n, 6]: the slices of every strip, strip after strip."""
    offsets: Index
    """int64 [strips + 1]."""

    @property
    def most(self) -> int:
        """The largest number of slices that meet one row."""
        return int(np.diff(self.offsets).max(initial=0))


def block_mask(table: SliceTable, device: torch.device, least_intervals: int = 1) -> Any:
    """FlexAttention's BlockMask of the table, built once per device.

    Args:
        least_intervals: the least number of intervals that the test of a cell compares, so that
            tables of different numbers of slices a row share one compiled kernel.
    """
    make = partial(_make_block_mask, table, device, least_intervals)
    return table.cached(("flex block mask", device, least_intervals), make)


def empty_rows(table: SliceTable, device: torch.device) -> Tensor | None:
    """bool [T, 1], made once per device: the rows that see nothing; None if every row sees a
    key, as in most tables, so that no pass over the rows is needed."""
    return table.cached(("flex empty rows", device), partial(_empty_rows, table, device))


def _empty_rows(table: SliceTable, device: torch.device) -> Tensor | None:
    empty = np.ones((table.num_q, 1), dtype=np.bool_)
    for start, end in table.covered_rows.tolist():
        empty[start:end] = False
    return torch.from_numpy(empty).to(device) if empty.any() else None


def clear_empty_rows(out: Tensor, lse: Tensor, table: SliceTable) -> tuple[Tensor, Tensor]:
    """out [T, H, E] with 0 and lse [T, H] with -inf in rows that see nothing, differentiable."""
    empty = empty_rows(table, out.device)
    if empty is None:
        return out, lse
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)


def rounded(count: int) -> int:
    """``count`` rounded up to one of eight lengths between powers of two, so that FlexAttention is
    compiled for few lengths."""
    step = max(BLOCK, 1 << max(count.bit_length() - 4, 0))
    return -(-count // step) * step


def _make_block_mask(table: SliceTable, device: torch.device, least_intervals: int) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    num_q, num_k = rounded(table.num_q), rounded(table.num_k)
    partial, full = (_in_blocks(x, num_q, num_k) for x in block_kinds(table))
    return BlockMask.from_kv_blocks(
        *block_lists(partial, device),
        *block_lists(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible_cells(table, device, least_intervals),
        seq_lengths=(num_q, num_k),
    )


def visible_cells(table: SliceTable, device: torch.device, least_intervals: int = 1) -> Visible:
    """The test of a cell, FlexAttention's ``mask_mod``.

    The sizes of the arrays that it reads are rounded, so that few variants are compiled.
    """
    strips = strips_of(table)
    num_intervals = power_of_two(max(strips.most, least_intervals))
    intervals = key_intervals(strips, num_intervals, rounded(table.num_q))
    begin, end = (torch.from_numpy(x).to(device) for x in intervals)

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k >= begin[0, q]) & (k < end[0, q])
        for r in range(1, num_intervals):
            seen = seen | ((k >= begin[r, q]) & (k < end[r, q]))
        return seen

    return visible


def key_intervals(strips: Strips, num_intervals: int, num_q: int) -> tuple[IntArray, IntArray]:
    """The begins and the ends of the intervals of keys that every row's slices have there, int32
    [R, T] each; the others are empty."""
    begin = np.zeros((num_intervals, num_q), dtype=np.int32)
    end = np.zeros_like(begin)
    heights = np.diff(strips.bounds)
    slice_of, behind = (np.repeat(x, heights) for x in (strips.offsets[:-1], strips.offsets[1:]))
    for r in range(strips.most):
        q = np.flatnonzero(slice_of + r < behind)
        _, _, k_start, k_end, d_lo, d_hi = strips.slices[slice_of[q] + r].T
        begin[r, q] = np.maximum(k_start, q + d_lo)
        end[r, q] = np.minimum(k_end, q + d_hi + 1)
    return begin, end


def strips_of(table: SliceTable) -> Strips:
    """The rows cut where slices begin or end."""
    slices = table.slices.astype(np.int64)
    bounds = np.unique(np.concatenate([[0, table.num_q], slices[:, 0], slices[:, 1]]))
    member, strip = counted_up(*(np.searchsorted(bounds, slices[:, i]) for i in (0, 1)))
    counts = np.bincount(strip, minlength=len(bounds) - 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return Strips(bounds, slices[member[np.argsort(strip, kind="stable")]], offsets)


def block_kinds(table: SliceTable, height: int = BLOCK) -> tuple[Blocks, Blocks]:
    """(partial, full), bool [q blocks, k blocks] each: blocks with some visible cells, and blocks
    that one slice covers completely. A block has ``height`` rows and BLOCK keys."""
    shape = -(-table.num_q // height), -(-table.num_k // BLOCK)
    slices = table.slices.astype(np.int64)
    member, row = counted_up(slices[:, 0] // height, -(-slices[:, 1] // height))
    q0, q1, k0, k1, d_lo, d_hi = slices[member].T
    top, bottom = np.maximum(row * height, q0), np.minimum((row + 1) * height, q1) - 1
    # Keys that some row of the block sees: without holes, since the rows' keys move by one a row.
    some = np.maximum(k0, top + d_lo) // BLOCK, -(-np.minimum(k1, bottom + d_hi + 1) // BLOCK)
    # Keys that all rows see, if the slice has all rows of the block.
    first = -(-np.maximum(k0, bottom + d_lo) // BLOCK)
    last = np.where(bottom - top + 1 == height, np.minimum(k1, top + d_hi + 1) // BLOCK, 0)
    full = _filled(shape, row, first, last)
    return _filled(shape, row, *some) & ~full, full


def _filled(shape: tuple[int, int], row: Index, first: Index, last: Index) -> Blocks:
    """bool of this shape: columns ``first[i]`` to ``last[i]`` of row ``row[i]`` are set."""
    edges = np.zeros((shape[0], shape[1] + 1), dtype=np.int32)
    kept = first < last
    np.add.at(edges, (row[kept], first[kept]), 1)
    np.add.at(edges, (row[kept], last[kept]), -1)
    return np.cumsum(edges, axis=1, dtype=np.int32)[:, :-1] > 0


def counted_up(first: Index, last: Index) -> tuple[Index, Index]:
    """Index i and value x, int64 [n] each, of all x with ``first[i] <= x < last[i]``, in order."""
    counts = np.maximum(last - first, 0)
    index = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return index, np.arange(len(index)) - starts[index] + first[index]


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count`` and 1."""
    return 1 << max(count - 1, 0).bit_length()


def _in_blocks(blocks: Blocks, num_q: int, num_k: int) -> Blocks:
    """``blocks`` padded with empty blocks up to these lengths."""
    more = num_q // BLOCK - blocks.shape[0], num_k // BLOCK - blocks.shape[1]
    return np.pad(blocks, ((0, more[0]), (0, more[1])))


def block_lists(
    blocks: Blocks, device: torch.device, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """The number of blocks that are set in each row, int32 [1, 1, rows], and which: all blocks of
    the row with those that are set first, int32 [1, 1, rows, columns], or the first ``most``."""
    counts = blocks.sum(1).astype(np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable")[:, :most].astype(np.int32)
    number, which = (torch.from_numpy(x)[None, None].to(device) for x in (counts, order))
    return number, which
