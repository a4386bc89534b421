"""RankPlan: what one rank computes and exchanges, stage by stage."""

from __future__ import annotations

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


def make_rank_plan(
    mask: AttnMask, dispatch: DispatchPlan, transfers: Int32Array, degree: int, rank: int
) -> RankPlan:
    """Derive one rank's view of a plan; see ``AttnPlan.rank_plan``."""
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
    return RankPlan(rank, dispatch.num_local_tokens, tuple(stages))
