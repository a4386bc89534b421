"""ShiftPlan: shift a whole sequence that is dispatched to ranks (multi-token prediction)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_magi.checks import integer
from megatron_magi.core.plan.group_cast_plan import GroupCastPlan, cast_of
from megatron_magi.core.plan.token_layout import Int64Array, TokenLayout, check_layout


@dataclass(frozen=True, eq=False)
class ShiftPlan:
    """shifted[i] = x_global[(pos_i + shift) mod total_seqlen]; padding rows stay as they are."""

    cast: GroupCastPlan
    """The rows that come from other ranks."""
    gather_index: Int64Array = field(repr=False)
    """int64 [num_local_tokens]: indices into concat(own rows, received rows)."""


def make_shift_plan(layout: TokenLayout, shift: int, rank: int) -> ShiftPlan:
    """The rank's part of a shift by ``shift`` rows (any sign; mod total_seqlen).

    A shift by ``-shift`` is its inverse and computes its gradient.

    Raises:
        ValueError: a rank outside the group.
    """
    check_layout(layout)
    layout.check_rank(rank)
    shift = integer(shift, "shift") % max(layout.total_seqlen, 1)
    cast = cast_of(layout, layout.native.shift_transfers(shift), rank)
    positions = layout.position_ids(rank)
    place = np.full(layout.padded_seqlen, -1, np.int64)
    place[positions] = np.arange(len(positions))
    at = len(positions)
    for start, end in cast.recv_ranges.tolist():
        place[start:end] = np.arange(at, at + end - start)
        at += end - start
    total = layout.total_seqlen
    source = np.where(positions < total, (positions + shift) % max(total, 1), positions)
    return ShiftPlan(cast, place[source])
