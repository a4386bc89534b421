"""Row counts between all pairs of ranks, for transports that read their peers' memory."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_magi.config import MagiConfig
from megatron_magi.core.plan.token_layout import Int32Array, Int64Array

MAX_PEERS = 64
"""The most ranks that read each other's memory. No host has more GPUs that can, and the table of
pairs stays small."""


class PeerStarts(NamedTuple):
    """Where the rows for one rank begin in what the other ranks send."""

    sent: tuple[int, ...]
    """[cp_size]: where they begin in the rows that each rank sends."""
    returned: tuple[int, ...]
    """[cp_size]: where they begin in the rows that each rank has received and returns in a
    group_reduce."""


class SlotRows(NamedTuple):
    """The most rows that any rank holds ready for its peers in one exchange; equal on all ranks."""

    sent: int
    returned: int
    """The rows that are returned, and the own rows before them."""


def reads_peers(config: MagiConfig, cp_size: int, ranks_per_node: int) -> bool:
    """True if a transport may read its peers' memory, so that the plan must say where."""
    may = config.transport != "all_to_all" and ranks_per_node == 0
    return may and 1 < cp_size <= MAX_PEERS


def peer_starts(transfers: Int32Array, cp_size: int, rank: int) -> PeerStarts:
    """
    Args:
        transfers: int32 [M, 5] (stage, dst, src, start, end), those of one exchange.
    """
    rows = rows_between(transfers, cp_size)
    return PeerStarts(tuple(rows[:, :rank].sum(1).tolist()), tuple(rows[:rank].sum(0).tolist()))


def slot_rows(transfers: Int32Array, cp_size: int, num_stages: int, own_rows: int) -> SlotRows:
    """
    Args:
        transfers: int32 [M, 5], those of all stages, ordered by stage.
        num_stages: of the backward, the one on own rows included. The forward may receive the rows
            of all stages at once.
        own_rows: rows of a rank, which lie before the received ones if there is one stage.
    """
    ends = np.searchsorted(transfers[:, 0], range(num_stages + 1)).tolist()
    stages = [rows_between(transfers[a:b], cp_size) for a, b in pairwise(ends)]
    sent = sum(stages[1:], stages[0]).sum(1)
    returned = max(int(rows.sum(0).max()) for rows in stages)
    return SlotRows(int(sent.max()), returned + (own_rows if num_stages == 1 else 0))


def rows_between(transfers: Int32Array, cp_size: int) -> Int64Array:
    """int64 [cp_size, cp_size]: the rows that each source sends to each destination."""
    _, dst, src, start, end = transfers.T.astype(np.int64)
    rows = np.bincount(src * cp_size + dst, end - start, cp_size * cp_size)
    return rows.astype(np.int64).reshape(cp_size, cp_size)
