"""Where a backward finds the rows that its forward has received and kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_magi.core.mask.row_ranges import rows_of
from megatron_magi.core.plan.rank_plan import RankPlan, StagePlan
from megatron_magi.core.plan.token_layout import Int32Array


@dataclass(frozen=True, eq=False)
class SavedKVIndex:
    """The rows of a backward stage among those of a forward's key buffers."""

    buffer: int
    """The number of the forward's key buffer, counting those that received rows."""
    start: int
    num_rows: int
    """The stage's key buffer is ``num_rows`` rows of that buffer from ``start`` on, unless there is
    an index."""
    index: Int32Array | None = field(default=None, repr=False)
    """int32 [n], read-only: the received rows of the stage, as rows of the forward's buffer. Own
    rows come before them and are not kept. None: the forward's buffer holds the whole key buffer of
    the stage in one piece."""


def saved_kv_index(view: RankPlan) -> dict[StagePlan, SavedKVIndex]:
    """For every stage of a backward that receives rows, where its forward has kept them."""
    buffers = [stage for stage in view.forward_stages if stage.cast is not None]
    return {stage: _find(stage, buffers) for stage in view.stages if stage.cast is not None}


def _find(stage: StagePlan, buffers: list[StagePlan]) -> SavedKVIndex:
    if stage in buffers:
        return SavedKVIndex(buffers.index(stage), 0, stage.num_keys)
    (received,) = buffers  # another forward than the staged one receives all rows at once
    assert stage.cast is not None and received.cast is not None
    there, here = rows_of(received.cast.recv_ranges), rows_of(stage.cast.recv_ranges)
    order = np.argsort(there, kind="stable")
    index = (order[np.searchsorted(there, here, sorter=order)] + received.num_own).astype(np.int32)
    start = int(index[0]) if len(index) else 0
    if stage.num_own == 0 and np.array_equal(index, np.arange(start, start + len(index))):
        return SavedKVIndex(0, start, len(index))
    index.setflags(write=False)
    return SavedKVIndex(0, 0, 0, index)
