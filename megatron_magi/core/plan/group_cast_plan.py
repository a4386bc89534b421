"""GroupCastPlan: one rank's send and receive tables for one exchange."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from megatron_magi.core.plan.peer_rows import PeerStarts, peer_starts
from megatron_magi.core.plan.token_layout import Int32Array, TokenLayout


@dataclass(frozen=True, eq=False)
class GroupCastPlan:
    """Local rows by the rank they go to, and global rows by the rank they come from.

    A row goes once to every rank that reads it. A group_reduce reads the same table backwards.
    """

    send_ranges: Int32Array = field(repr=False)
    """int32 [n, 2], read-only: runs of the rows below, ordered by destination, then row."""
    send_counts: tuple[int, ...]
    """[cp_size]: number of rows sent to each rank."""
    recv_counts: tuple[int, ...]
    """[cp_size]: number of rows received from each rank."""
    recv_ranges: Int32Array = field(repr=False)
    """int32 [n, 2], read-only: global rows in receive-buffer order: by source, then row."""
    own_ranges: Int32Array = field(repr=False)
    """int32 [n, 2], read-only, ascending: local rows that come before the received ones."""
    num_rows: int
    """Number of rows of the tensors that rows are sent from: the local tokens, or what the exchange
    before this one has brought."""
    starts: PeerStarts | None = None
    """Where rows begin at the peers. None: no transport reads its peers' memory."""

    @cached_property
    def num_sent(self) -> int:
        """Number of rows sent; a row counts once for each of its destinations."""
        return sum(self.send_counts)

    @cached_property
    def num_recv(self) -> int:
        """Number of rows received."""
        return sum(self.recv_counts)

    @cached_property
    def num_own(self) -> int:
        """Number of own rows before the received ones."""
        return int((self.own_ranges[:, 1] - self.own_ranges[:, 0]).sum())

    def located(self, transfers: Int32Array, rank: int) -> GroupCastPlan:
        """The same exchange, which now says where the rank's rows lie at its peers.

        Args:
            transfers: int32 [M, 5] of this exchange, all ranks.
        """
        return replace(self, starts=peer_starts(transfers, len(self.send_counts), rank))

    def with_own(self, own_ranges: Int32Array) -> GroupCastPlan:
        """The same exchange behind other own rows; it shares the tables of this one."""
        return replace(self, own_ranges=own_ranges)


NO_RANGES: Int32Array = np.zeros((0, 2), np.int32)
NO_RANGES.setflags(write=False)


def cast_of(
    layout: TokenLayout, transfers: Int32Array, rank: int, own_ranges: Int32Array = NO_RANGES
) -> GroupCastPlan:
    """The rank's tables of one exchange.

    Args:
        transfers: int32 [M, 5] (stage, dst, src, start, end) of all ranks, one stage, ordered.
    """
    table = layout.native.cast_table(transfers, rank)
    return cast_of_table(table, layout.num_local_tokens, own_ranges)


CastTable: TypeAlias = "tuple[Int32Array, tuple[int, ...], tuple[int, ...], Int32Array]"
"""Send ranges, send counts, receive counts, receive ranges, as the solver returns them."""


def cast_of_table(
    table: CastTable, num_rows: int, own_ranges: Int32Array = NO_RANGES
) -> GroupCastPlan:
    """The plan of a table of the solver."""
    send_ranges, send_counts, recv_counts, recv_ranges = table
    send_ranges.setflags(write=False)
    recv_ranges.setflags(write=False)
    return GroupCastPlan(send_ranges, send_counts, recv_counts, recv_ranges, own_ranges, num_rows)
