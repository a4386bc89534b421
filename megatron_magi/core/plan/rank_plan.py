"""RankPlan: what one rank computes and exchanges, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_magi.core.mask import AttnMask
from megatron_magi.core.native import solver
from megatron_magi.core.plan.dispatch import DispatchPlan, Int32Array
from megatron_magi.core.plan.group_cast import GroupCastPlan, cast_of


@dataclass(frozen=True, eq=False)
class StagePlan:
    """One kernel call and the exchange that feeds it."""

    slices: Int32Array = field(repr=False)
    """int32 [n, 6], canonical, read-only: q = local row, k = row of this stage's key buffer."""
    num_keys: int
    """Rows of the key buffer."""
    cast: GroupCastPlan | None
    """None where no rank receives anything: then there is nothing to call, on any rank."""


@dataclass(frozen=True, eq=False)
class RankPlan:
    """A rank's stages.

    Overlap degree 0: one stage whose key buffer is [own rows | received rows]. Degree n: stage 0
    on own rows, stages 1..n on the rows they receive. Every rank has the same number of stages.
    """

    rank: int
    num_local_tokens: int
    stages: tuple[StagePlan, ...]
    """Of the plan's overlap degree; the backward's."""
    forward_stages: tuple[StagePlan, ...]
    """Of its forward degree: ``stages`` themselves, or one that receives all their rows."""


def make_rank_plan(
    mask: AttnMask,
    dispatch: DispatchPlan,
    transfers: Int32Array,
    rank: int,
    *,
    degree: int,
    forward_degree: int,
) -> RankPlan:
    """Derive one rank's view of a plan; see ``AttnPlan.rank_plan``."""
    stages = forward = _stages(mask, dispatch, transfers, degree, rank)
    if forward_degree != degree:
        forward = _stages(mask, dispatch, in_one_stage(transfers), 0, rank)
    return RankPlan(rank, dispatch.num_local_tokens, stages, forward)


def most_buffered_rows(stages: Sequence[StagePlan]) -> int:
    """Rows of the key buffers that are alive at once: of a stage and of the next, which arrives.

    A stage on own rows alone has no buffer.
    """
    rows = [0 if s.cast is None else s.num_keys for s in stages]
    return max((sum(rows[i : i + 2]) for i in range(len(rows))), default=0)


def in_one_stage(transfers: Int32Array) -> Int32Array:
    """The same transfers in stage 0, in the order of a plan: by destination, source and row."""
    _, dst, src, start, _ = transfers.T
    ordered = transfers[np.lexsort((start, src, dst))]
    ordered[:, 0] = 0
    return ordered


def _stages(
    mask: AttnMask, dispatch: DispatchPlan, transfers: Int32Array, degree: int, rank: int
) -> tuple[StagePlan, ...]:
    stages = []
    for stage in range(degree + 1):
        begin, end = np.searchsorted(transfers[:, 0], [stage, stage + 1])
        cast = cast_of(dispatch, transfers[begin:end], rank) if end > begin else None
        received = cast.recv_ranges if cast else np.zeros((0, 2), np.int32)
        own_keys = stage == 0
        slices = solver.stage_slices(
            mask.slices, *dispatch.layout, rank=rank, recv_ranges=received, own_keys=own_keys
        )
        slices.setflags(write=False)
        num_keys = (dispatch.num_local_tokens if own_keys else 0) + (cast.num_recv if cast else 0)
        stages.append(StagePlan(slices, num_keys, cast))
    return tuple(stages)
