"""A GroupCastPlan on one device: the tables that an exchange needs, built once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from megatron_magi.core.comm.rows import RowSources, source_tables
from megatron_magi.core.comm.transport import RowCounts
from megatron_magi.core.cuda.tables import DeviceTable, upload_together
from megatron_magi.core.mask.row_ranges import rows_of
from megatron_magi.core.plan import GroupCastPlan, NodeCastPlan
from megatron_magi.core.plan.token_layout import Int32Array


@dataclass(frozen=True, eq=False, slots=True)
class PreparedCast:
    """A cast on one device, and the reduce that is its opposite."""

    sent: RowCounts
    """The rows of the cast."""
    returned: RowCounts
    """The rows of the reduce."""
    num_sent: int
    num_recv: int
    num_own: int
    """Number of own rows before the received ones."""
    send: DeviceTable
    """int32 [num_sent]: local rows in the order they are sent."""
    own: DeviceTable | None
    """int32 [num_own]: local rows before the received ones; None: none, or all local rows."""
    sources: RowSources | None
    """Returned partial sums by the row they are added to. None means that none is returned."""
    peers: list[slice]
    """Each peer's part of the returned partial sums; a peer sends a row at most once."""

    def own_rows(self) -> Tensor | None:
        """``own``, for launches on the current stream; None: the first ``num_own`` rows."""
        return None if self.own is None else self.own.here()

    @property
    def reduce_sources(self) -> RowSources:
        """``sources`` of a cast whose rows a group_reduce returns."""
        assert self.sources is not None, "the cast was prepared without its reduce"
        return self.sources


@dataclass(frozen=True, eq=False, slots=True)
class PreparedNodeCast:
    """A cast among several nodes on one device; see NodeCastPlan."""

    first: PreparedCast
    spreading: PreparedCast

    @property
    def num_own(self) -> int:
        return self.first.num_own

    def own_rows(self) -> Tensor | None:
        """The rows of the first exchange that are this rank's own; see PreparedCast."""
        return self.first.own_rows()


AnyCastPlan: TypeAlias = "GroupCastPlan | NodeCastPlan"
AnyPreparedCast: TypeAlias = "PreparedCast | PreparedNodeCast"


def prepare_casts(
    casts: Sequence[AnyCastPlan],
    device: torch.device,
    reduced: Collection[AnyCastPlan] | None = None,
) -> list[AnyPreparedCast]:
    """Prepare all casts with one upload of their tables.

    Args:
        reduced: the casts whose rows a group_reduce will return; None: all.

    Cost: the host sorts ``num_sent`` numbers for each cast in ``reduced``; it does not wait.
    """
    host: dict[_Key, Int32Array] = {}
    for cast in casts:
        for leg in _legs(cast):
            _add_tables(host, leg, reduced is None or cast in reduced)
    made = dict(zip(host, upload_together(list(host.values()), device), strict=True))
    ready: list[AnyPreparedCast] = []
    for cast in casts:
        legs = [_assemble(leg, made) for leg in _legs(cast)]
        ready.append(legs[0] if len(legs) == 1 else PreparedNodeCast(*legs))
    return ready


def _legs(cast: AnyCastPlan) -> tuple[GroupCastPlan, ...]:
    if isinstance(cast, NodeCastPlan):
        return cast.first, cast.spreading
    return (cast,)


_Key = tuple[str, int]
"""A table's name and the id of the ranges that it lists: two casts may share their ranges."""


def _add_tables(host: dict[_Key, Int32Array], cast: GroupCastPlan, is_reduced: bool) -> None:
    send, own = id(cast.send_ranges), id(cast.own_ranges)
    if ("rows", send) not in host:
        host["rows", send] = rows_of(cast.send_ranges)
    if is_reduced and ("begin", send) not in host:
        tables = source_tables(host["rows", send], cast.num_rows)
        host["begin", send], host["sources", send] = tables
    if cast.num_own not in (0, cast.num_rows) and ("rows", own) not in host:
        host["rows", own] = rows_of(cast.own_ranges)


def _assemble(cast: GroupCastPlan, made: dict[_Key, DeviceTable]) -> PreparedCast:
    ranges = id(cast.send_ranges)
    rows, begin = made["rows", ranges], made.get(("begin", ranges))
    send, recv = list(cast.send_counts), list(cast.recv_counts)
    return PreparedCast(
        RowCounts(send, recv, None if cast.starts is None else list(cast.starts.sent)),
        RowCounts(recv, send, None if cast.starts is None else list(cast.starts.returned)),
        cast.num_sent,
        cast.num_recv,
        cast.num_own,
        rows,
        made.get(("rows", id(cast.own_ranges))),
        None if begin is None else RowSources(rows, begin, made["sources", ranges]),
        [slice(*pair) for pair in pairwise([0, *accumulate(cast.send_counts)])],
    )
