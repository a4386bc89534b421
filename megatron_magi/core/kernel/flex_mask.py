"""Slices as FlexAttention's BlockMask, without a dense mask in between.

Rows are cut into strips that the same slices cover. Slices share no cell, so those of a strip stand
in one order of keys on all of its rows. The test of a cell inside a partial block compares the
slices of its row one by one if they are few. Otherwise it compares those that meet the keys around
the cell; a table says where they are. PyTorch compiles the test by writing out every use of a value
again, so a search by halving, whose steps use each other's results, would not compile.
Shapes: T query rows, R intervals, B ranges of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.mask.slices import IntArray

BLOCK = 128
"""Side of a block of the block mask, FlexAttention's default."""

MOST_COMPARED = 32
"""Up to this many slices of a row are compared one by one, at two comparisons for every cell of a
partial block each. With more, only those near the cell are compared, at four loads each."""

RANGES = (128, 64, 32, 16)
"""Keys of a range of the table, tried in this order until few slices meet each."""
FEW_NEAR = 8
MOST_PLACES = 2**24
"""Limit of the table's entries (64 MiB), above which no finer ranges are tried."""

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Blocks = npt.NDArray[np.bool_]
Index = npt.NDArray[np.int64]


class Strips(NamedTuple):
    """Strip s is the rows ``bounds[s]`` to ``bounds[s + 1]``, and the slices ``offsets[s]`` to
    ``offsets[s + 1]`` cover them, in ascending order of their keys."""

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


def block_mask(table: SliceTable, device: torch.device) -> Any:
    """FlexAttention's BlockMask of the table, built once per device."""
    key = ("flex block mask", device)
    if key not in table.cache:
        with torch.inference_mode(False):  # later calls may save its tensors for backward
            table.cache[key] = _make_block_mask(table, device)
    return table.cache[key]


def empty_rows(table: SliceTable, device: torch.device) -> Tensor:
    """bool [T], made once per device: the rows that see nothing."""
    key = ("flex empty rows", device)
    if key not in table.cache:
        empty = np.ones(table.num_q, dtype=np.bool_)
        for start, end in table.covered_rows.tolist():
            empty[start:end] = False
        with torch.inference_mode(False):
            table.cache[key] = torch.from_numpy(empty).to(device)
    return table.cache[key]


def rounded(count: int) -> int:
    """``count`` rounded up to one of eight lengths between powers of two, to compile for few."""
    step = max(BLOCK, 1 << max(count.bit_length() - 4, 0))
    return -(-count // step) * step


def _make_block_mask(table: SliceTable, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    num_q, num_k = rounded(table.num_q), rounded(table.num_k)
    partial, full = (_in_blocks(x, num_q, num_k) for x in block_kinds(table))
    return BlockMask.from_kv_blocks(
        *_block_lists(partial, device),
        *_block_lists(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible_cells(table, device),
        seq_lengths=(num_q, num_k),
    )


def visible_cells(table: SliceTable, device: torch.device) -> Visible:
    """The test of a cell, FlexAttention's ``mask_mod``.

    The sizes of what it reads are rounded, so that few variants are compiled.
    """
    strips = strips_of(table)
    num_q, num_k = rounded(table.num_q), rounded(table.num_k)
    if strips.most <= MOST_COMPARED:
        return _compared(*(torch.from_numpy(x).to(device) for x in _intervals(strips, num_q)))
    return _looked_up(strips, num_q, num_k, device)


def _compared(first: Tensor, last: Tensor) -> Visible:
    """Row q sees keys ``first[r, q] <= k < last[r, q]``, both int32 [R, T]."""
    num_intervals = first.shape[0]

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k >= first[0, q]) & (k < last[0, q])
        for r in range(1, num_intervals):
            seen = seen | ((k >= first[r, q]) & (k < last[r, q]))
        return seen

    return visible


def _intervals(strips: Strips, num_q: int) -> tuple[IntArray, IntArray]:
    """First and last + 1 key, [R, T] each, of every row's slices; R is a power of two."""
    first = np.zeros((_power_of_two(strips.most), num_q), dtype=np.int32)
    last = np.zeros_like(first)
    heights = np.diff(strips.bounds)
    begin, end = (np.repeat(x, heights) for x in (strips.offsets[:-1], strips.offsets[1:]))
    for r in range(strips.most):
        q = np.flatnonzero(begin + r < end)
        _, _, k_start, k_end, d_lo, d_hi = strips.slices[begin[q] + r].T
        first[r, q] = np.maximum(k_start, q + d_lo)
        last[r, q] = np.minimum(k_end, q + d_hi + 1)
    return first, last


def _looked_up(strips: Strips, num_q: int, num_k: int, device: torch.device) -> Visible:
    """Compares the slices of the row's strip from the first one on that meets the key's range."""
    for keys in RANGES:
        near, widest = _slices_near(strips, num_k, keys)
        if widest <= FEW_NEAR or 2 * near.size > MOST_PLACES:
            break
    tables = (*_spaced_out(strips, near, widest), _strip_of_rows(strips, num_q))
    bands, places, strip_of = (torch.from_numpy(x).to(device) for x in tables)
    k_start, k_end, d_lo, d_hi = bands

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        def seen_in(r: int) -> Tensor:
            at = places[strip_of[q], k // keys] + r
            inside = (k >= k_start[at]) & (k < k_end[at])
            return inside & (k - q >= d_lo[at]) & (k - q <= d_hi[at])

        seen = seen_in(0)
        for r in range(1, widest):
            seen = seen | seen_in(r)
        return seen

    return visible


def _spaced_out(strips: Strips, near: Index, widest: int) -> tuple[IntArray, IntArray]:
    """Keys and bands, int32 [4, n], and the places in them, int32 [strips, B]; rounded lengths.

    Behind the slices of a strip are ``widest`` empty ones, since a test always compares so many.
    """
    number = np.arange(len(near))
    length = _power_of_two(len(strips.slices) + widest * len(near))
    bands = np.zeros((4, length), dtype=np.int32)
    strip = np.repeat(number[:-1], np.diff(strips.offsets))
    bands[:, np.arange(len(strip)) + widest * strip] = strips.slices[:, 2:].T
    places = np.zeros((_power_of_two(len(near)), near.shape[1]), dtype=np.int32)
    places[: len(near)] = near + widest * number[:, None]
    return bands, places


def _strip_of_rows(strips: Strips, num_q: int) -> IntArray:
    """int32 [num_q]: the strip of every row; rows that were added have one of their own."""
    bounds = np.append(strips.bounds, num_q)
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)).astype(np.int32)


def _slices_near(strips: Strips, num_k: int, keys: int) -> tuple[Index, int]:
    """Where the slices that meet a range of so many keys begin, and how many they are at most.

    Returns:
        int64 [strips + 1, B]: the first slice of the strip that meets the range or one behind it;
        the last strip stands for the rows that were added. The number is a power of two.
    """
    num_strips = len(strips.bounds) - 1
    strip = np.repeat(np.arange(num_strips), np.diff(strips.offsets))
    _, _, k_start, k_end, d_lo, d_hi = strips.slices.T
    least = np.maximum(k_start, strips.bounds[strip] + d_lo) // keys
    most = (np.minimum(k_end, strips.bounds[strip + 1] + d_hi) - 1) // keys
    number = np.arange(len(strip))
    near = np.repeat(np.append(strips.offsets[1:], len(strip))[:, None], num_k // keys, axis=1)
    np.minimum.at(near, (strip, most), number)
    near = np.minimum.accumulate(near[:, ::-1], axis=1)[:, ::-1]
    behind = np.zeros_like(near)
    np.maximum.at(behind, (strip, least), number + 1)
    behind = np.maximum.accumulate(behind, axis=1)
    return near, _power_of_two(int((behind - near).max(initial=0)))


def strips_of(table: SliceTable) -> Strips:
    """The rows cut where slices begin or end."""
    slices = table.slices.astype(np.int64)
    bounds = np.unique(np.concatenate([[0, table.num_q], slices[:, 0], slices[:, 1]]))
    member, strip = _counted_up(*(np.searchsorted(bounds, slices[:, i]) for i in (0, 1)))
    key = np.maximum(slices[member, 2], bounds[strip] + slices[member, 4])
    counts = np.bincount(strip, minlength=len(bounds) - 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return Strips(bounds, slices[member[np.lexsort((key, strip))]], offsets)


def block_kinds(table: SliceTable) -> tuple[Blocks, Blocks]:
    """(partial, full), bool [q blocks, k blocks] each: blocks with some visible cells, and blocks
    that one slice covers completely."""
    shape = -(-table.num_q // BLOCK), -(-table.num_k // BLOCK)
    slices = table.slices.astype(np.int64)
    member, row = _counted_up(slices[:, 0] // BLOCK, -(-slices[:, 1] // BLOCK))
    q0, q1, k0, k1, d_lo, d_hi = slices[member].T
    top, bottom = np.maximum(row * BLOCK, q0), np.minimum((row + 1) * BLOCK, q1) - 1
    # Keys that some row of the block sees: without holes, since the rows' keys move by one a row.
    some = np.maximum(k0, top + d_lo) // BLOCK, -(-np.minimum(k1, bottom + d_hi + 1) // BLOCK)
    # Keys that all rows see, if the slice has all rows of the block.
    first = -(-np.maximum(k0, bottom + d_lo) // BLOCK)
    last = np.where(bottom - top + 1 == BLOCK, np.minimum(k1, top + d_hi + 1) // BLOCK, 0)
    full = _filled(shape, row, first, last)
    return _filled(shape, row, *some) & ~full, full


def _filled(shape: tuple[int, int], row: Index, first: Index, last: Index) -> Blocks:
    """bool of this shape: columns ``first[i]`` to ``last[i]`` of row ``row[i]`` are set."""
    edges = np.zeros((shape[0], shape[1] + 1), dtype=np.int32)
    kept = first < last
    np.add.at(edges, (row[kept], first[kept]), 1)
    np.add.at(edges, (row[kept], last[kept]), -1)
    return np.cumsum(edges, axis=1, dtype=np.int32)[:, :-1] > 0


def _counted_up(first: Index, last: Index) -> tuple[Index, Index]:
    """Index i and value x of all x with ``first[i] <= x < last[i]``, in order."""
    counts = np.maximum(last - first, 0)
    index = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return index, np.arange(len(index)) - starts[index] + first[index]


def _power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count`` and 1."""
    return 1 << max(count - 1, 0).bit_length()


def _in_blocks(blocks: Blocks, num_q: int, num_k: int) -> Blocks:
    """``blocks`` padded with empty blocks up to these lengths."""
    more = num_q // BLOCK - blocks.shape[0], num_k // BLOCK - blocks.shape[1]
    return np.pad(blocks, ((0, more[0]), (0, more[1])))


def _block_lists(blocks: Blocks, device: torch.device) -> tuple[Tensor, Tensor]:
    """Per q block, the number of its k blocks, int32 [1, 1, q blocks], and all k blocks, its own
    first, int32 [1, 1, q blocks, k blocks]."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    counts = blocks.sum(1).astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(order)[None, None].to(
        device
    )
