"""NodeCastPlan: one rank's tables for one exchange among several nodes.

A row crosses the link from its node to another node once and spreads inside that node; see
csrc/planner/nodes.h.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from megatron_magi.core.plan.group_cast_plan import NO_RANGES, GroupCastPlan, cast_of_table
from megatron_magi.core.plan.token_layout import Int32Array, TokenLayout


@dataclass(frozen=True, eq=False)
class NodeCastPlan:
    """Two exchanges that stand for one. The key buffer holds own rows, then what ``first`` brings,
    which includes rows that this rank only relays, then what ``spreading`` brings."""

    first: GroupCastPlan
    """The exchange with the ranks of the node, and with this rank's relays: the ranks of the same
    number on other nodes."""
    spreading: GroupCastPlan
    """The exchange in which the node's relays spread rows; ``send_ranges`` are rows of what
    ``first`` brings."""
    recv_ranges: Int32Array = field(repr=False)
    """int32 [n, 2], read-only: global rows in the order of the key buffer."""

    @property
    def own_ranges(self) -> Int32Array:
        return self.first.own_ranges

    @property
    def num_recv(self) -> int:
        """Rows that the key buffer receives."""
        return self.first.num_recv + self.spreading.num_recv

    def with_own(self, own_ranges: Int32Array) -> NodeCastPlan:
        """The same exchange behind other own rows; it shares the tables of this one."""
        return replace(self, first=self.first.with_own(own_ranges))


def node_cast_of(
    layout: TokenLayout,
    transfers: Int32Array,
    rank: int,
    ranks_per_node: int,
    own_ranges: Int32Array = NO_RANGES,
) -> NodeCastPlan:
    """The rank's tables of one exchange.

    Args:
        transfers: int32 [M, 5] (stage, dst, src, start, end) of one stage, ordered; those from the
            rank and those to its node are enough.
    """
    tables = layout.native.node_cast_table(transfers, ranks_per_node, rank)
    first = cast_of_table(tables[0], layout.num_local_tokens, own_ranges)
    spreading = cast_of_table(tables[1], first.num_recv)
    received = np.concatenate([first.recv_ranges, spreading.recv_ranges])
    received.setflags(write=False)
    return NodeCastPlan(first, spreading, received)
