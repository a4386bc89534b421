"""The times that the planner predicts, and by which it chooses overlap degree and forward mode."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_magi.core.plan.attn_plan import FORWARD_MODES, AttnPlan, check_plan
from megatron_magi.core.plan.stage_costs import stage_costs


@dataclass(frozen=True, eq=False)
class StageTimes:
    """One layer under the plan's cost table, in microseconds; a model, not a measurement."""

    forward: npt.NDArray[np.float64] = field(repr=False)
    """[cp_size, num_stages, 4]: a stage's (receive_start, receive_end, compute_start, compute_end)
    from the forward's start. Stages receive equal parts of the rows."""
    backward: npt.NDArray[np.float64] = field(repr=False)
    """[cp_size]: the whole backward of each rank."""

    @property
    def forward_us(self) -> float:
        """The forward of the slowest rank."""
        return float(self.forward[:, -1, 3].max())

    @property
    def backward_us(self) -> float:
        """The backward of the slowest rank. The planner minimises the sum of this and
        ``forward_us``."""
        return float(self.backward.max())

    @property
    def exposed_share(self) -> float:
        """Share of the forward's transfer time in which a rank waits, over all ranks; 0 without
        any transfer."""
        receiving = (self.forward[..., 1] - self.forward[..., 0]).sum()
        done = np.pad(self.forward[:, :-1, 3], ((0, 0), (1, 0)))
        waiting = (self.forward[..., 2] - done).sum()
        return float(waiting / receiving) if receiving else 0.0


def predict_times(plan: AttnPlan) -> StageTimes:
    """The planner's own prediction for the plan's degree and mode; see csrc/planner/stages.h.

    Raises:
        TypeError: no plan.
    """
    check_plan(plan)
    stage = stage_costs(plan.head_shape, plan.config, plan.layout.num_local_tokens)
    native = plan.layout.native
    rows = native.rows_on_link(plan.transfers, stage, plan.ranks_per_node)
    work = native.rank_work(
        plan.mask.slices, loads=plan.loads, link_rows=rows, keys=plan.key_layout.native
    )
    mode = FORWARD_MODES.index(plan.forward_mode)
    return StageTimes(
        stage.forward_stages(work, plan.overlap_degree, mode),
        stage.backward_times(work, plan.overlap_degree),
    )
