"""RankPlan: what one rank computes and exchanges, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_magi.checks import instance
from megatron_magi.config import ForwardMode
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.mask.row_ranges import joined
from megatron_magi.core.plan.group_cast_plan import NO_RANGES, GroupCastPlan, cast_of
from megatron_magi.core.plan.node_cast_plan import NodeCastPlan, node_cast_of
from megatron_magi.core.plan.token_layout import Homes, Int32Array


@dataclass(frozen=True, eq=False)
class StagePlan:
    """One kernel call and the exchange that feeds it."""

    slices: Int32Array = field(repr=False)
    """int32 [n, 6], canonical, read-only: q = local row, k = row of this stage's key buffer."""
    num_keys: int
    """Rows of the key buffer."""
    cast: GroupCastPlan | NodeCastPlan | None
    """The exchange that fills the buffer: own rows, then received ones. None if no rank receives
    rows; the buffer is then this rank's rows, or empty."""
    left_rows: Int32Array = field(default_factory=lambda: NO_RANGES, repr=False)
    """int32 [n, 2], read-only: local query rows that another stage computes."""

    @property
    def num_own(self) -> int:
        """Number of own rows in the key buffer; they come first."""
        return self.num_keys - (0 if self.cast is None else self.cast.num_recv)


@dataclass(frozen=True, eq=False)
class QueryStage:
    """One kernel call for other ranks' queries on own keys, and the exchange that brings them."""

    slices: Int32Array = field(repr=False)
    """int32 [n, 6], canonical, read-only: q = received row, k = local row."""
    cast: GroupCastPlan


@dataclass(frozen=True, eq=False)
class RankPlan:
    """A rank's stages.

    With overlap degree 0 there is one stage, whose key buffer is [own rows | received rows]. With
    degree n, stage 0 computes on own rows and stages 1..n on the rows that they receive. Every rank
    has the same number of stages.
    """

    rank: int
    num_local_tokens: int
    stages: tuple[StagePlan, ...]
    """The backward's stages, given by the plan's overlap degree."""
    forward_stages: tuple[StagePlan, ...]
    """The forward's stages, given by the plan's forward mode: ``stages`` themselves, or one stage,
    or two stages with different query rows."""
    forward_merges: bool
    """True if a query row may attend in several of the forward's stages."""
    queries: QueryStage | None = None
    """The queries of other ranks that attend on this rank's keys; None: no rank sends queries."""


class Staging(NamedTuple):
    """When rows are exchanged, and between which links."""

    degree: int
    """The plan's overlap degree."""
    mode: ForwardMode
    ranks_per_node: int
    """0: links are not told apart."""
    reads_peers: bool
    """True if the exchanges' tables say where a rank's rows lie at its peers."""


def make_rank_plan(
    mask: AttnMask, homes: Homes, transfers: Int32Array, rank: int, staging: Staging
) -> RankPlan:
    """Derive one rank's view of a plan; see ``AttnPlan.rank_plan``."""
    degree, mode, ranks_per_node, reads_peers = staging
    view = _View(mask, homes, rank, ranks_per_node)
    ends = np.searchsorted(transfers[:, 0], range(degree + 2))
    exchanging = [bool(begin < end) for begin, end in pairwise(ends.tolist())]
    # Large plans have millions of transfers between other ranks. For these it only matters whether
    # there are any.
    mine = transfers[view.concern(transfers)]
    stages = forward = view.stages(mine, exchanging)
    if mode == "at_once" and degree > 0:
        forward = view.stages(in_one_stage(mine), [len(transfers) > 0])
    elif mode == "local_first" and len(transfers):
        forward = view.local_first(in_one_stage(mine))
    if reads_peers:
        parts = [transfers[a:b] for a, b in pairwise(ends.tolist())]
        located = view.locating(stages, parts)
        forward = located if forward is stages else view.locating(forward, [transfers] * 2)
        stages = located
    if degree == 1 and forward is not stages and stages[1].cast is not None:
        forward = (*forward[:-1], _sending_as(forward[-1], stages[1].cast))
    merges = forward is stages and degree > 0 and len(transfers) > 0
    return RankPlan(rank, homes.queries.num_local_tokens, stages, forward, merges)


def most_buffered_rows(stages: Sequence[StagePlan]) -> int:
    """The most rows that key buffers hold at once: those of a stage and of the next one, whose rows
    are arriving.

    A stage on own rows alone has no buffer.
    """
    instance(stages, (list, tuple), "stages", "pass the stages of a RankPlan")
    for stage in stages:
        instance(stage, StagePlan, "every stage", "pass the stages of a RankPlan")
    rows = [0 if s.cast is None else s.num_keys for s in stages]
    return max((sum(rows[i : i + 2]) for i in range(len(rows))), default=0)


def _sending_as(stage: StagePlan, cast: GroupCastPlan | NodeCastPlan) -> StagePlan:
    """The stage with the tables of another cast of the same rows, so that both share indices."""
    assert stage.cast is not None
    assert np.array_equal(stage.cast.recv_ranges, cast.recv_ranges)
    return replace(stage, cast=cast.with_own(stage.cast.own_ranges))


def in_one_stage(transfers: Int32Array) -> Int32Array:
    """The same transfers in stage 0, in the order of a plan: by destination, source and row."""
    _, dst, src, start, _ = transfers.T
    ordered = transfers[np.lexsort((start, src, dst))]
    ordered[:, 0] = 0
    return ordered


@dataclass(frozen=True)
class _View:
    """Builds one rank's stages."""

    mask: AttnMask
    homes: Homes
    rank: int
    ranks_per_node: int
    """0: links are not told apart."""

    def concern(self, transfers: Int32Array) -> npt.NDArray[np.bool_]:
        """Mask of the transfers that the rank has a part in, as a relay too."""
        dst, src = transfers[:, 1], transfers[:, 2]
        per_node = self.ranks_per_node or 1
        arrives: npt.NDArray[np.bool_] = dst // per_node == self.rank // per_node
        return arrives | (src == self.rank)

    def stages(self, transfers: Int32Array, exchanging: Sequence[bool]) -> tuple[StagePlan, ...]:
        """The stages of a rank, one for each entry of ``exchanging``.

        Args:
            transfers: those that the rank has a part in.
            exchanging: [num_stages] whether any ranks exchange rows in the stage.
        """
        everything = np.array([[0, self.homes.keys.num_local_tokens]], np.int32)
        stages = []
        for stage, is_exchanging in enumerate(exchanging):
            begin, end = np.searchsorted(transfers[:, 0], [stage, stage + 1])
            own = everything if stage == 0 else NO_RANGES
            stages.append(self._stage(own, transfers[begin:end] if is_exchanging else None))
        return tuple(stages)

    def local_first(self, transfers: Int32Array) -> tuple[StagePlan, StagePlan]:
        """Two stages: query rows that see own keys only, and then all others, with only those own
        keys that they see."""
        queries, keys = self.homes
        everything = np.array([[0, keys.num_local_tokens]], np.int32)
        local, waiting = queries.native.split_rows(self.mask.slices, self.rank, keys.native)
        own = self._slices(keys.local_ranges(self.rank), waiting)
        needed = joined(own[:, 2:4])
        first = self._stage(everything, None, local)
        then = self._stage(needed, transfers, waiting)
        return replace(first, left_rows=joined(then.slices[:, :2])), then

    def locating(
        self, stages: Sequence[StagePlan], transfers: Sequence[Int32Array]
    ) -> tuple[StagePlan, ...]:
        """The stages, whose casts now say where this rank's rows lie at its peers.

        Args:
            transfers: of all ranks, for each stage that exchanges rows.
        """
        made = []
        for stage, part in zip(stages, transfers, strict=False):
            if isinstance(stage.cast, GroupCastPlan):
                stage = replace(stage, cast=stage.cast.located(part, self.rank))
            made.append(stage)
        return tuple(made)

    def _stage(
        self, own: Int32Array, transfers: Int32Array | None, queries: Int32Array | None = None
    ) -> StagePlan:
        """One stage: its cast, the length of its key buffer, and its slices.

        Args:
            own: local rows at the front of the key buffer.
            transfers: those that the rank has a part in, perhaps none; None: no rank exchanges
                rows.
            queries: global rows that attend; None: all rows of the rank.
        """
        cast = None if transfers is None else self._cast(transfers, own)
        received = cast.recv_ranges if cast else NO_RANGES
        keys = np.concatenate([self._globally(own), received])
        num_keys = int((keys[:, 1] - keys[:, 0]).sum())
        return StagePlan(self._slices(keys, queries), num_keys, cast)

    def _cast(self, transfers: Int32Array, own: Int32Array) -> GroupCastPlan | NodeCastPlan:
        if self.ranks_per_node:
            return node_cast_of(self.homes.keys, transfers, self.rank, self.ranks_per_node, own)
        return cast_of(self.homes.keys, transfers, self.rank, own)

    def _slices(self, keys: Int32Array, queries: Int32Array | None) -> Int32Array:
        slices = self.homes.queries.native.stage_slices(
            self.mask.slices, rank=self.rank, key_ranges=keys, query_ranges=queries
        )
        slices.setflags(write=False)
        return slices

    def _globally(self, ranges: Int32Array) -> Int32Array:
        """Local rows of keys as global ones, in the same order."""
        runs = self.homes.keys.local_ranges(self.rank)
        ends = np.cumsum(runs[:, 1] - runs[:, 0])
        parts = []
        for start, end in ranges.tolist():
            while start < end:
                run = int(np.searchsorted(ends, start, side="right"))
                stop = min(end, int(ends[run]))
                shift = int(runs[run, 1]) - int(ends[run])
                parts.append((start + shift, stop + shift))
                start = stop
        return np.array(parts, np.int32).reshape(-1, 2)
