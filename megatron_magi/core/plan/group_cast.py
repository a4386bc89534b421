"""GroupCastPlan: one rank's send and receive tables for one exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megatron_magi.core.plan.token_layout import Int32Array, TokenLayout


@dataclass(frozen=True, eq=False)
class GroupCastPlan:
    """Which local rows go to whom and which global rows arrive from whom.

    A row goes to every rank that reads it, once. A group_reduce is the same table read backwards.
    """

    send_ranges: Int32Array = field(repr=False)
    """int32 [n, 2], read-only: local row runs, ordered by destination, then row."""
    send_counts: tuple[int, ...]
    """Rows to every peer: [cp_size]."""
    recv_counts: tuple[int, ...]
    """Rows from every peer: [cp_size]."""
    recv_ranges: Int32Array = field(repr=False)
    """int32 [n, 2], read-only: global rows in receive-buffer order: by source, then row."""
    own_ranges: Int32Array = field(repr=False)
    """int32 [n, 2], read-only, ascending: local rows that stand in front of the received ones."""

    @cached_property
    def num_sent(self) -> int:
        """Rows sent, one count per destination."""
        return sum(self.send_counts)

    @cached_property
    def num_recv(self) -> int:
        """Rows received."""
        return sum(self.recv_counts)

    @cached_property
    def num_own(self) -> int:
        """Own rows in front of them."""
        return int((self.own_ranges[:, 1] - self.own_ranges[:, 0]).sum())


NO_RANGES: Int32Array = np.zeros((0, 2), np.int32)
NO_RANGES.setflags(write=False)


def cast_of(
    layout: TokenLayout, transfers: Int32Array, rank: int, own_ranges: Int32Array = NO_RANGES
) -> GroupCastPlan:
    """The rank's tables of one exchange.

    Args:
        transfers: int32 [M, 5] (stage, dst, src, start, end) of all ranks, one stage, ordered.
    """
    send_ranges, send_counts, recv_counts, recv_ranges = layout.native.cast_table(transfers, rank)
    send_ranges.setflags(write=False)
    recv_ranges.setflags(write=False)
    return GroupCastPlan(send_ranges, send_counts, recv_counts, recv_ranges, own_ranges)
