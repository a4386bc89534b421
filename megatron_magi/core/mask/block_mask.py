"""Block-sparse masks: a boolean matrix of blocks becomes few slices.

Runs of blocks that a row of blocks sees are found first, and equal runs of consecutive rows are
joined into one rectangle. Both steps sort or scan arrays, so the time is linear in the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_magi.checks import (
    INT32_MAX,
    as_array,
    flag,
    integer,
    is_integer_like,
    pair,
)
from megatron_magi.core.mask.mask import AttnMask
from megatron_magi.core.mask.slices import BAND_MAX, BAND_MIN

Blocks = npt.NDArray[np.bool_]
Index = npt.NDArray[np.int64]

MAX_TOTAL = INT32_MAX // 2
"""The most tokens of a mask."""
MAX_BLOCK_SLICES = 2_500_000
"""Limit of the slices of one block mask, so that its work lists take at most about half a minute
and 5 GB. One core needed 2.5 s for a mask of 2.4 million slices (2^20 tokens, random blocks of 256,
of which 20 % are visible), 11 s for its forward work list and 1 s for its backward one (6 s if
deterministic), with 4.3 GB at most."""


def from_block_mask(
    blocks: npt.ArrayLike,
    block_size: int | Sequence[int],
    total_seqlen_q: int | None = None,
    total_seqlen_k: int | None = None,
    *,
    causal: bool = False,
) -> AttnMask:
    """Block-sparse attention: a query sees the keys of the blocks that its own block sees.

    Args:
        blocks: bool [num_q_blocks, num_k_blocks], an array, a list of rows or a CPU tensor.
        block_size: tokens of a block, one number or (queries, keys).
        total_seqlen_q: number of queries; the last block may be partial. None: all are whole.
        total_seqlen_k: number of keys; None: as the queries if they are given, or else whole
            blocks.
        causal: no key after the query, where the last query is aligned with the last key. Blocks
            on the diagonal are cut, and it does not matter what ``blocks`` has above them.

    Raises:
        ValueError: a matrix that does not fit the lengths, or that takes more than 2.5 million
            slices.
        TypeError: a matrix that is not boolean, or not on the CPU.
    """
    seen = _matrix(blocks)
    size_q, size_k = _sizes(block_size)
    total_q = _total(total_seqlen_q, None, seen.shape[0], size_q, "q")
    total_k = _total(total_seqlen_k, total_seqlen_q, seen.shape[1], size_k, "k")
    d_hi = BAND_MAX
    if flag(causal, "causal"):
        d_hi = total_k - total_q
        ends = np.minimum(np.arange(size_q, total_q + size_q, size_q), total_q)
        seen = _extended(seen, (ends - 1 + d_hi) // size_k)
    rectangles = _rectangles(seen)
    _check_count(len(rectangles), seen)
    slices = np.empty((len(rectangles), 6), dtype=np.int32)
    slices[:, :2] = np.minimum(rectangles[:, :2] * size_q, total_q)
    slices[:, 2:4] = np.minimum(rectangles[:, 2:] * size_k, total_k)
    slices[:, 4], slices[:, 5] = BAND_MIN, d_hi
    return AttnMask(slices, total_q, total_k)


def _extended(seen: Blocks, diagonal: Index) -> Blocks:
    """Blocks above the diagonal take the value of the one on it, so that rows have equal runs.

    Args:
        diagonal: [num_q_blocks], the last block that a causal row of blocks may see, -1 for none.
    """
    if seen.size == 0:
        return seen
    on_diagonal = np.take_along_axis(seen, np.maximum(diagonal, 0)[:, None], axis=1)
    on_diagonal &= diagonal[:, None] >= 0
    return np.where(np.arange(seen.shape[1]) > diagonal[:, None], on_diagonal, seen)


def _rectangles(seen: Blocks) -> Index:
    """[n, 4]: first and last + 1 row, first and last + 1 column of disjoint rectangles of True."""
    row, first, last = _runs(seen)
    num_q, num_k = seen.shape
    # One number per run, so that equal runs of consecutive rows become consecutive numbers.
    key = (first * (num_k + 1) + last) * (num_q + 1) + row
    key.sort()
    is_top = np.append(True, np.diff(key) != 1)[: len(key)]
    top, bottom = key[is_top], key[np.append(is_top[1:], True)[: len(key)]]
    run, row = np.divmod(top, num_q + 1)
    return np.stack([row, row + bottom - top + 1, *np.divmod(run, num_k + 1)], axis=1)


def _runs(seen: Blocks) -> tuple[Index, Index, Index]:
    """Row, first and last + 1 column of every run of True."""
    num_q, num_k = seen.shape
    padded = np.zeros((num_q, num_k + 2), dtype=np.bool_)
    padded[:, 1:-1] = seen
    edges = np.flatnonzero(padded[:, 1:] != padded[:, :-1])
    row, first = np.divmod(edges[0::2], num_k + 1)
    return row, first, edges[1::2] % (num_k + 1)


def _check_count(count: int, seen: Blocks) -> None:
    if count > MAX_BLOCK_SLICES:
        raise ValueError(
            f"a block mask may take at most {MAX_BLOCK_SLICES:,} slices, got {count:,} from "
            f"{seen.shape[0]:,} x {seen.shape[1]:,} blocks; use larger blocks, or choose runs of "
            f"neighbouring blocks"
        )


def _sizes(block_size: int | Sequence[int]) -> tuple[int, int]:
    if is_integer_like(block_size):
        block_size = (block_size, block_size)  # type: ignore[assignment]
    sizes = pair(block_size, "block_size", "(queries, keys)")
    size_q, size_k = (integer(size, "block_size", 1, INT32_MAX) for size in sizes)
    return size_q, size_k


def _total(given: int | None, default: int | None, count: int, size: int, name: str) -> int:
    """The number of tokens of ``count`` blocks, of which the last may be partial."""
    total = default if given is None else given
    total = integer(count * size if total is None else total, f"total_seqlen_{name}", 0, MAX_TOTAL)
    if -(-total // size) != count:
        raise ValueError(
            f"blocks must have one {'row' if name == 'q' else 'column'} per {size} tokens of "
            f"total_seqlen_{name} = {total}, which are {-(-total // size)}, got {count}; pass the "
            f"block size and the length of the {'queries' if name == 'q' else 'keys'}"
        )
    return total


def _matrix(blocks: npt.ArrayLike) -> Blocks:
    required = "blocks must be a boolean matrix on the CPU"
    matrix = as_array(blocks, required, "call .cpu(), and pass rows of equal length")
    if matrix.dtype != np.bool_:
        raise TypeError(
            f"blocks must be boolean, got {matrix.dtype} {list(matrix.shape)}; compare it with 0"
        )
    if matrix.ndim != 2:
        raise ValueError(
            f"blocks must be [num_q_blocks, num_k_blocks], got {list(matrix.shape)}; build one "
            f"mask per group of heads"
        )
    return matrix
