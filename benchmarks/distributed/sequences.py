"""What FlashAttention's packed functions take, from the slices of a rank: sequences, each a range
of rows with a range of keys, aligned at the bottom right.

T rows, S keys of a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_magi import AttnMask
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.viz.document_zigzag import DocumentZigzag

Int64Array = npt.NDArray[np.int64]

NO_DOCUMENTS = "no documents in this mask"
OTHER_RULE = "documents are neither full, causal nor causal with a window"


def window_of(mask: AttnMask) -> int:
    """Keys to its left that a row of packed causal documents sees, -1: all of its document.

    Raises:
        ValueError: the mask is not made of documents that are all full, all causal, or all causal
            with a window.
    """
    documents = DocumentZigzag.of(mask, 1)
    if documents is None:
        raise ValueError(NO_DOCUMENTS)
    seen = documents.reach[:, 0] >= 0
    left, right = documents.reach[seen].T
    most = np.diff(documents.starts)[seen] - 1
    if (right == most).all() and (left == most).all():
        return -1
    if right.any():
        raise ValueError(OTHER_RULE)
    return -1 if (left == most).all() else int(left.max())


@dataclass(frozen=True)
class Sequences:
    """Rows of one call, ascending and disjoint."""

    ranges: Int64Array
    """int64 [N, 4]: first row, row after the last, first key, key after the last."""
    causal: bool

    @classmethod
    def of(cls, table: SliceTable, left: int) -> Sequences:
        """Those of a table of packed documents, or of a part of their rows and keys.

        Args:
            left: see ``window_of``.

        Raises:
            ValueError: its rows do not see ranges of keys by one rule.
        """
        low, high = _seen(table)
        rows = np.flatnonzero(high > low)
        low, high = low[rows], high[rows]
        reach = left if left >= 0 else table.num_k
        follows = np.diff(rows) == 1
        constant = follows & (np.diff(high) == 0) & (np.diff(low) == 0)
        growing = follows & (np.diff(high) == 1)
        growing &= low[1:] == np.maximum(low[:-1], high[1:] - 1 - reach)
        if constant.any() and growing.any():
            raise ValueError("some rows are full and some are causal, one rule for all is required")
        begins = np.flatnonzero(np.r_[True, ~(constant | growing)][: len(rows)])
        ends = np.r_[begins[1:], len(rows)][: len(begins)] - 1
        ranges = np.stack([rows[begins], rows[ends] + 1, low[begins], high[ends]], axis=1)
        return cls(ranges, not constant.any())

    def without_common_keys(self) -> list[Sequences]:
        """As few calls as each has keys that ascend: gradients of keys do not add up in a call."""
        calls: list[list[Int64Array]] = []
        for sequence in self.ranges:
            fitting = (call for call in calls if call[-1][3] <= sequence[2])
            call = next(fitting, None)
            if call is None:
                calls.append([sequence])
            else:
                call.append(sequence)
        return [Sequences(np.stack(call), self.causal) for call in calls]

    def with_empty_rows(self) -> Sequences:
        """Rows between those of two sequences become a sequence without keys, so that the kernel
        writes what comes out of them: 0."""
        gaps = np.flatnonzero(self.ranges[1:, 0] > self.ranges[:-1, 1])
        before, behind = self.ranges[gaps], self.ranges[gaps + 1]
        none = np.stack([before[:, 1], behind[:, 0], before[:, 2], before[:, 2]], axis=1)
        return Sequences(np.insert(self.ranges, gaps + 1, none, axis=0), self.causal)

    @property
    def rows(self) -> slice:
        """From the first to the last."""
        edges = self.ranges[:, :2]
        return slice(int(edges[0, 0]), int(edges[-1, 1])) if len(edges) else slice(0, 0)

    @property
    def keys(self) -> slice:
        return slice(int(self.ranges[:, 2].min()), int(self.ranges[:, 3].max()))

    @property
    def num_rows(self) -> int:
        """That see something."""
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum())

    def arguments(self) -> dict[str, Any]:
        """cu_seqlens, seqused (None where sequences are adjacent) and max_seqlen of q and k, as
        int32 arrays, relative to ``rows`` and ``keys``."""
        begin_q, end_q, begin_k, end_k = self.ranges.T
        made: dict[str, Any] = {}
        for side, begin, end in (("q", begin_q, end_q), ("k", begin_k, end_k)):
            adjacent = np.array_equal(begin[1:], end[:-1])
            edges = np.r_[begin, end[-1:]] - begin.min()
            made[f"cu_seqlens_{side}"] = edges.astype(np.int32)
            made[f"seqused_{side}"] = None if adjacent else (end - begin).astype(np.int32)
            made[f"max_seqlen_{side}"] = int((end - begin).max())
        return made


def _seen(table: SliceTable) -> tuple[Int64Array, Int64Array]:
    """int64 [T] each: first key, and key after the last one, that a row sees; 0 and 0: none."""
    low, high = np.full(table.num_q, table.num_k), np.zeros(table.num_q, np.int64)
    count = np.zeros(table.num_q, np.int64)
    for q0, q1, k0, k1, d_lo, d_hi in table.slices.astype(np.int64):
        rows = np.arange(q0, q1)
        first, last = np.maximum(k0, rows + d_lo), np.minimum(k1, rows + d_hi + 1)
        rows, first, last = (x[last > first] for x in (rows, first, last))
        low[rows], high[rows] = np.minimum(low[rows], first), np.maximum(high[rows], last)
        count[rows] += last - first
    if not np.array_equal(count, np.maximum(high - low, 0)):
        raise ValueError("every row must see one range of keys, got rows that see several")
    return np.where(count > 0, low, 0), high
