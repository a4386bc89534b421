"""Sets of rows as sorted ranges: integers [n, 2], (start, end) each; results keep the dtype."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_magi.core.mask.slices import IntArray

Integer = TypeVar("Integer", bound=np.signedinteger[Any])


def joined(ranges: npt.NDArray[Integer]) -> npt.NDArray[Integer]:
    """The union of ranges in any order: ascending, not touching, read-only."""
    if len(ranges) == 0:
        return _array([], ranges)
    ordered = ranges[np.argsort(ranges[:, 0])]
    reached = np.maximum.accumulate(ordered[:, 1])
    apart = ordered[1:, 0] > reached[:-1]
    starts, ends = ordered[np.append(True, apart), 0], reached[np.append(apart, True)]
    union = np.stack([starts, ends], axis=1)
    union.setflags(write=False)
    return union


def without(ranges: npt.NDArray[Integer], others: npt.NDArray[Integer]) -> npt.NDArray[Integer]:
    """The rows of ``ranges`` that are not in ``others``; both ascending and disjoint."""
    kept: list[list[int]] = []
    holes = others.tolist()
    at = 0
    for start, end in ranges.tolist():
        while at < len(holes) and holes[at][1] <= start:
            at += 1
        for hole in range(at, len(holes)):
            if holes[hole][0] >= end:
                break
            if start < holes[hole][0]:
                kept.append([start, holes[hole][0]])
            start = holes[hole][1]
        if start < end:
            kept.append([start, end])
    return _array(kept, ranges)


def rows_of(ranges: IntArray) -> IntArray:
    """int32 [num_rows]: every row in ranges of any order."""
    lengths = (ranges[:, 1] - ranges[:, 0]).astype(np.int64)
    first = np.repeat(ranges[:, 0] - lengths.cumsum() + lengths, lengths)
    return (first + np.arange(len(first))).astype(np.int32)


def _array(ranges: list[list[int]], like: npt.NDArray[Integer]) -> npt.NDArray[Integer]:
    made = np.array(ranges, like.dtype).reshape(-1, 2)
    made.setflags(write=False)
    return made
