"""A table cut into parts with few slices in every row, for FlexAttention and FlashAttention-4.

The test of a cell compares the slices of its row one by one. With many of them it would be slow,
and compiling it would take long. Attention over disjoint keys can be merged, so a table with more
slices in a row is computed part by part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.flex_block_mask import BLOCK, Index, counted_up, strips_of
from megatron_magi.core.kernel.slice_table import SliceTable

MOST_COMPARED = 32
"""The most slices of a row in one part, chosen for FlexAttention. Each takes two comparisons in a
cell of a partial block."""


class Part(NamedTuple):
    """A call whose table has few slices a row."""

    call: AttnCall
    least_intervals: int
    """The least number of intervals that the test of a cell compares: parts of one table share a
    compiled kernel."""


def slice_parts(call: AttnCall) -> list[Part]:
    """Calls that share no cell and together have all cells of this one."""
    tables = table_parts(call.table)
    least = 1 if len(tables) == 1 else MOST_COMPARED
    return [Part(call._replace(table=table), least) for table in tables]


def table_parts(table: SliceTable) -> tuple[SliceTable, ...]:
    """Tables that share no cell and together have all cells of the table; made once.

    No row meets more than MOST_COMPARED slices of a part. Neighbouring keys are in one part, so
    that parts have few blocks in common.
    """
    key = "parts of few slices"
    if key not in table.cache:
        # () stands for the table itself: its own cache must not refer to it.
        few = strips_of(table).most <= MOST_COMPARED
        table.cache[key] = () if few else _cut(table)
    return table.cache[key] or (table,)


def _cut(table: SliceTable) -> tuple[SliceTable, ...]:
    pieces = _pieces(table)
    part = _part_of(pieces)
    return tuple(
        SliceTable(pieces[part == p].astype(np.int32), table.num_q, table.num_k)
        for p in range(int(part.max()) + 1)
    )


def _pieces(table: SliceTable) -> Index:
    """int64 [n, 6]: the slices cut at rows of blocks, by these rows and then by their first key."""
    slices = table.slices.astype(np.int64)
    member, row = counted_up(slices[:, 0] // BLOCK, -(-slices[:, 1] // BLOCK))
    pieces = slices[member]
    pieces[:, 0] = np.maximum(pieces[:, 0], row * BLOCK)
    pieces[:, 1] = np.minimum(pieces[:, 1], (row + 1) * BLOCK)
    key = np.maximum(pieces[:, 2], pieces[:, 0] + pieces[:, 4])
    return pieces[np.lexsort((key, row))]


def _part_of(pieces: Index) -> Index:
    """int64 [n]: in each row of blocks, the next part begins when a row of this one is full."""
    parts = np.zeros(len(pieces), dtype=np.int64)
    block, part, counts = -1, 0, np.zeros(BLOCK, dtype=np.int64)
    for i, (start, end) in enumerate(pieces[:, :2].tolist()):
        if start // BLOCK != block:
            block, part, counts[:] = start // BLOCK, 0, 0
        rows = counts[start - block * BLOCK : end - block * BLOCK]
        if rows.max() == MOST_COMPARED:
            part, counts[:] = part + 1, 0
        rows += 1
        parts[i] = part
    return parts
