"""Zigzag per document: how Megatron and TransformerEngine lay out packed documents (THD)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_magi.core.mask import AttnMask

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DocumentZigzag:
    """Every document is padded to a multiple of 2 * cp_size rows and cut in 2 * cp_size pieces, of
    which rank r takes the pieces r and 2 * cp_size - 1 - r.

    Local order of a rank: document by document, in each first the piece from the front, then that
    from the back. Rows outside every document count as a document that sees nothing.
    """

    cp_size: int
    starts: Int64Array = field(repr=False)
    """int64 [num_documents + 1]: where documents begin, and the end of the last one."""
    reach: Int64Array = field(repr=False)
    """int64 [num_documents, 2]: keys that a row sees to its left and to its right, inside its
    document; -1 where it does not even see itself."""

    @classmethod
    def of(cls, mask: AttnMask, cp_size: int) -> DocumentZigzag | None:
        """The layout of this mask; None if the mask is not made of packed documents.

        Packed documents attend only within themselves, by one rule for all (full, causal or a
        window).
        """
        q0, q1, k0, k1, d_lo, d_hi = mask.slices.astype(np.int64).T
        longest = np.array([-d_lo, d_hi]).max(axis=1, initial=-1)
        is_alone = (q0 == k0).all() and (q1 == k1).all() and (q1[:-1] <= q0[1:]).all()
        one_rule = all(
            np.array_equal(side, np.minimum(most, q1 - q0 - 1))
            for side, most in zip((-d_lo, d_hi), longest, strict=True)
        )
        if not (len(q0) and is_alone and one_rule):
            return None
        starts = np.unique(np.concatenate([[0], q0, q1, [mask.total_seqlen_q]]))
        reach = np.full((len(starts) - 1, 2), -1, np.int64)
        reach[np.searchsorted(starts, q0)] = np.stack([-d_lo, d_hi], axis=1)
        return cls(cp_size, starts, reach)

    @cached_property
    def piece_sizes(self) -> Int64Array:
        """int64 [num_documents]: rows of one piece of a document, padding included."""
        return -(-np.diff(self.starts) // (2 * self.cp_size))

    @property
    def num_local_tokens(self) -> int:
        """Rows of one rank, padding included."""
        return 2 * int(self.piece_sizes.sum())

    @property
    def padding_tokens(self) -> int:
        """Padding rows of all ranks together."""
        return self.cp_size * self.num_local_tokens - int(self.starts[-1])

    def runs(self, rank: int) -> Int64Array:
        """int64 [n, 4], without padding: first row, row after the last, local row of the first,
        document."""
        size = self.piece_sizes
        begin, end = self.starts[:-1], self.starts[1:]
        local = 2 * (np.cumsum(size) - size)
        pieces = [
            (begin + i * size, begin + (i + 1) * size, local + half * size, np.arange(len(size)))
            for half, i in enumerate((rank, 2 * self.cp_size - 1 - rank))
        ]
        runs = np.stack([np.stack(piece, axis=1) for piece in pieces], axis=1)
        runs[:, :, 1] = np.minimum(runs[:, :, 1], end[:, None])
        flat = runs.reshape(-1, 4)
        return flat[flat[:, 0] < flat[:, 1]]

    def rows(self, rank: int) -> Int64Array:
        """int64 [num_local_tokens]: the row of the sequence of every local row, -1 for padding."""
        rows = np.full(self.num_local_tokens, -1, np.int64)
        start, end, local, _ = self.runs(rank).T
        within = np.arange((end - start).sum()) - np.repeat(
            np.cumsum(end - start) - (end - start), end - start
        )
        rows[np.repeat(local, end - start) + within] = np.repeat(start, end - start) + within
        return rows

    def rows_needed(self) -> Int64Array:
        """int64 [cp_size]: key rows that each rank reads and does not own."""
        return np.array([self._rows_needed(rank) for rank in range(self.cp_size)])

    def loads(self, tile_q: int, tile_k: int) -> Int64Array:
        """int64 [cp_size]: kernel tiles per rank, counted as the planner counts them."""
        return np.array([self._load(rank, tile_q, tile_k) for rank in range(self.cp_size)])

    def _rows_needed(self, rank: int) -> int:
        start, end, _, document = self.runs(rank).T
        first, last = self._keys(start, end, document)
        read = union_length(np.zeros_like(start), first, last)
        # Rows that see something are read by their own rank.
        return read - int((end - start)[self.reach[document, 0] >= 0].sum())

    def _load(self, rank: int, tile_q: int, tile_k: int) -> int:
        runs = self.runs(rank)
        tiles = (runs[:, 2] + runs[:, 1] - runs[:, 0] - 1) // tile_q - runs[:, 2] // tile_q + 1
        start, end, local, document = np.repeat(runs, tiles, axis=0).T
        nth = np.arange(len(start)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        tile = local // tile_q + nth
        shift = start - local
        first, last = self._keys(
            np.maximum(start, tile * tile_q + shift),
            np.minimum(end, (tile + 1) * tile_q + shift),
            document,
        )
        blocks = first // tile_k, np.where(last > first, -(-last // tile_k), first // tile_k)
        return union_length(tile, *blocks)

    def _keys(
        self, start: Int64Array, end: Int64Array, document: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """First key, and key after the last one, that the rows [start, end) of a document see."""
        left, right = self.reach[document].T
        first = np.maximum(self.starts[document], start - left)
        last = np.minimum(self.starts[document + 1], end + right)
        return first, np.where(left < 0, first, last)


def union_length(groups: Int64Array, starts: Int64Array, ends: Int64Array) -> int:
    """How many numbers the unions of the ranges [start, end) of each group have in all.

    Ranges are ascending: by group, and by start inside a group.
    """
    offset = groups * (int(ends.max(initial=0)) + 1)
    reached = np.maximum.accumulate(np.concatenate([[0], ends + offset]))[:-1]
    return int(np.maximum(0, ends + offset - np.maximum(starts + offset, reached)).sum())
