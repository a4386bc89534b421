"""A GroupCastPlan on one device: what an exchange needs at hand, made once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from megatron_magi.core.comm.rows import RowSources, source_tables
from megatron_magi.core.cuda.tables import DeviceTable, upload_together
from megatron_magi.core.plan import GroupCastPlan
from megatron_magi.core.plan.token_layout import Int32Array


@dataclass(frozen=True, eq=False, slots=True)
class PreparedCast:
    """A cast on one device, and the reduce that is its mirror."""

    send_counts: list[int]
    """Rows to every peer."""
    recv_counts: list[int]
    """Rows from every peer."""
    num_sent: int
    num_recv: int
    num_own: int
    """Own rows in front of the received ones."""
    send: DeviceTable
    """int32 [num_sent]: local rows in the order they are sent."""
    own: DeviceTable | None
    """int32 [num_own]: local rows in front of the received ones; None: none, or all of them."""
    sources: RowSources | None
    """Where partial sums are added that come back; None: nothing comes back."""
    peers: list[slice]
    """Every peer's part of what comes back; a peer sends a row at most once."""


def prepare_casts(
    casts: Sequence[GroupCastPlan],
    num_rows: int,
    device: torch.device,
    reduced: Collection[GroupCastPlan] | None = None,
) -> list[PreparedCast]:
    """The tables of all of them, by one upload.

    Args:
        num_rows: local rows, from which rows are sent.
        reduced: those that a group_reduce mirrors; None: all.

    Cost: the host sorts ``num_sent`` numbers for each cast in ``reduced``; it waits for nothing.
    """
    host: dict[_Key, Int32Array] = {}
    for cast in casts:
        _add_tables(host, cast, num_rows, reduced is None or cast in reduced)
    made = dict(zip(host, upload_together(list(host.values()), device), strict=True))
    return [_assemble(cast, made) for cast in casts]


_Key = tuple[str, int]
"""A table's name and whose ranges it is of, by identity: two casts may share them."""


def _add_tables(
    host: dict[_Key, Int32Array], cast: GroupCastPlan, num_rows: int, is_reduced: bool
) -> None:
    send, own = id(cast.send_ranges), id(cast.own_ranges)
    if ("rows", send) not in host:
        host["rows", send] = rows_of(cast.send_ranges)
    if is_reduced and ("begin", send) not in host:
        tables = source_tables(host["rows", send], num_rows)
        host["begin", send], host["sources", send] = tables
    if cast.num_own not in (0, num_rows) and ("rows", own) not in host:
        host["rows", own] = rows_of(cast.own_ranges)


def _assemble(cast: GroupCastPlan, made: dict[_Key, DeviceTable]) -> PreparedCast:
    send = id(cast.send_ranges)
    rows, begin = made["rows", send], made.get(("begin", send))
    return PreparedCast(
        list(cast.send_counts),
        list(cast.recv_counts),
        cast.num_sent,
        cast.num_recv,
        cast.num_own,
        rows,
        made.get(("rows", id(cast.own_ranges))),
        None if begin is None else RowSources(rows, begin, made["sources", send]),
        [slice(*pair) for pair in pairwise([0, *accumulate(cast.send_counts)])],
    )


def rows_of(ranges: Int32Array) -> Int32Array:
    """int32: every row of int32 [n, 2] ranges."""
    lengths = (ranges[:, 1] - ranges[:, 0]).astype(np.int64)
    first = np.repeat(ranges[:, 0] - lengths.cumsum() + lengths, lengths)
    return (first + np.arange(len(first))).astype(np.int32)
