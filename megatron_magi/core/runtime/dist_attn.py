"""Distributed attention: one loop over stages, forward and backward.

Stage i + 1's keys and values travel while stage i computes. The verbs differ: forward attends and
merges (out, lse); backward adds to dq and sends dk, dv home, again while the next stage computes.
Keys and values are fetched again in backward rather than kept, so memory does not grow with the
number of ranks.

T local tokens, S rows of a stage's key buffer, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_magi.core.comm.group_cast import PendingCast, group_cast
from megatron_magi.core.comm.group_reduce import PendingReduce, group_reduce
from megatron_magi.core.comm.process_group import CpGroup, group_rank, resolve_group
from megatron_magi.core.kernel.backend import AttnBackend, acc_dtype, select_backend
from megatron_magi.core.kernel.calls import differentiable_once, refuse_tangents
from megatron_magi.core.kernel.flex_attn import check_qkv
from megatron_magi.core.kernel.ops import score_delta
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.plan import AttnPlan, RankPlan, StagePlan
from megatron_magi.core.runtime.agreement import ensure_agreed
from megatron_magi.core.runtime.token_dispatch import check_group

_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def dist_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttnPlan,
    cp_group: CpGroup,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the dispatched sequence; out and lse are differentiable in q, k and v.

    Args:
        q: [T, H, D], this rank's tokens in local order.
        k, v: [T, G, D].
        plan: the plan that dispatched them, or one with another mask on the same layout.
        cp_group: the context-parallel group, a 1-D mesh, or None for one rank.
        softmax_scale: None: 1 / sqrt(D).

    Returns:
        out: [T, H, D] in q's dtype, 0 where a token sees nothing.
        lse: [T, H] natural log, fp32 (fp64 for fp64 inputs), -inf there.

    Raises:
        ValueError, TypeError: tensors or a group that do not fit the plan.
        AgreementError: ranks that planned different things.
        NotImplementedError: inputs with forward-mode tangents.
        RuntimeError: in backward, a second derivative.

    Cost: forward receives the key/value rows this rank needs, once each; backward receives them
    again and returns their gradients. The host does not wait on the device.
    """
    check_group(plan, cp_group)
    _check_local(q, k, v, plan)
    refuse_tangents(q, k, v)
    ensure_agreed(plan, cp_group)
    work = _StageWork(
        plan.rank_plan(group_rank(cp_group)),
        resolve_group(cp_group),
        select_backend(plan.config.kernel_backend, q.device, q.dtype, plan.config.deterministic),
        q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
        acc_dtype(q.dtype) if plan.config.dkv_reduce_in_fp32 else q.dtype,
    )
    out, lse = _DistAttn.apply(q, k, v, work)
    return out, lse


@dataclass(frozen=True)
class _StageWork:
    """What the loop needs beside tensors."""

    rank_plan: RankPlan
    group: dist.ProcessGroup | None
    backend: AttnBackend
    softmax_scale: float
    wire_dtype: torch.dtype
    """Of partial gradients on their way home."""


Attend = Callable[[StagePlan, Tensor, Tensor], None]
Pair = tuple[Tensor, Tensor]


def _for_each_stage(work: _StageWork, k: Tensor, v: Tensor, attend: Attend) -> None:
    """Run ``attend(stage, keys, values)`` for all stages, fetching one stage ahead."""
    # A stage without keys and without a cast is empty on every rank.
    stages = [s for s in work.rank_plan.stages if s.num_keys or s.cast is not None]
    arriving = _fetch(stages[0], k, v, work.group)
    for i, stage in enumerate(stages):
        following = None
        if i + 1 < len(stages):
            following = _fetch(stages[i + 1], k, v, work.group)
        attend(stage, *_stage_keys(stage, k, v, arriving))
        arriving = following


def _fetch(
    stage: StagePlan, k: Tensor, v: Tensor, group: dist.ProcessGroup | None
) -> PendingCast | None:
    return None if stage.cast is None else group_cast((k, v), stage.cast, group)


def _stage_keys(
    stage: StagePlan, k: Tensor, v: Tensor, arriving: PendingCast | None
) -> tuple[Tensor, Tensor]:
    """The stage's key buffer: own rows, received rows, or (degree 0) own and then received."""
    if arriving is None:
        return k, v
    keys, values = arriving.wait()
    if stage.num_keys == len(keys):
        return keys, values
    return torch.cat([k, keys]), torch.cat([v, values])


class _DistAttn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: _StageWork
    ) -> tuple[Tensor, Tensor]:
        so_far: tuple[Tensor, Tensor] | None = None
        # One stage writes the final dtype directly; several accumulate first.
        dtype = q.dtype if len(work.rank_plan.stages) == 1 else acc_dtype(q.dtype)

        def attend(stage: StagePlan, keys: Tensor, values: Tensor) -> None:
            nonlocal so_far
            if so_far is not None and not len(stage.slices):
                return
            so_far = work.backend.forward(
                q, keys, values, _table(stage, len(q)), work.softmax_scale,
                prev=so_far, out_dtype=dtype,
            )  # fmt: skip

        _for_each_stage(work, k, v, attend)
        assert so_far is not None, "a plan has at least one stage"
        out, lse = so_far[0].to(q.dtype), so_far[1]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.work = work
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        work: _StageWork = ctx.work
        dout = torch.zeros_like(out) if dout is None else dout
        delta = score_delta(out, dout, dlse, lse.dtype)
        dtype = _sum_dtype(work.rank_plan, q.dtype)
        dq: Tensor | None = None
        homeward = _Homeward(work)

        def attend(stage: StagePlan, keys: Tensor, values: Tensor) -> None:
            nonlocal dq
            wanted = dtype if _own_keys(stage) else work.wire_dtype
            if len(stage.slices):
                if dq is None and wanted != dtype:
                    dq = torch.zeros_like(q, dtype=dtype)
                dq, dkeys, dvalues = work.backend.backward(
                    dout, q, keys, values, lse, delta, _table(stage, len(q)), work.softmax_scale,
                    dq_acc=dq, grad_dtype=wanted,
                )  # fmt: skip
            else:
                dkeys, dvalues = (torch.zeros_like(x, dtype=wanted) for x in (keys, values))
            homeward.send(stage, (dkeys, dvalues))

        _for_each_stage(work, k, v, attend)
        dk, dv = homeward.sums(k, v, dtype)
        dq = torch.zeros_like(q) if dq is None else dq.to(q.dtype)
        return dq, _alone(dk.to(k.dtype)), _alone(dv.to(v.dtype)), None


class _Homeward:
    """Gradients of a stage's keys and values on their way to the ranks that own the rows."""

    def __init__(self, work: _StageWork) -> None:
        self.work = work
        self.mine: Pair | None = None  # of this rank's rows, all in the first stage
        self.pending: list[PendingReduce] = []

    def send(self, stage: StagePlan, grads: Pair) -> None:
        own = _own_keys(stage)
        if own:
            self.mine = grads[0][:own], grads[1][:own]
        if stage.cast is not None:
            partials = [x[own:].to(self.work.wire_dtype) for x in grads]
            self.pending.append(group_reduce(partials, stage.cast, self.work.group))

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> Pair:
        """Of this rank's rows, when all have arrived."""
        found = self.mine or (torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype))
        for pending in self.pending:
            pending.add_into(found)
        return found


def _own_keys(stage: StagePlan) -> int:
    """How many of the stage's keys are this rank's own; they come first."""
    return stage.num_keys - (0 if stage.cast is None else stage.cast.num_recv)


def _alone(x: Tensor) -> Tensor:
    """``x`` without the rest of a buffer that it may be a view of: gradients are kept."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def _sum_dtype(plan: RankPlan, dtype: torch.dtype) -> torch.dtype:
    """Partial results are added in the accumulation dtype; a single one is the result."""
    alone = len(plan.stages) == 1 and plan.stages[0].cast is None
    return dtype if alone else acc_dtype(dtype)


def _table(stage: StagePlan, num_q: int) -> SliceTable:
    """The stage's slices with the backends' caches, one table for all layers and microbatches."""
    if stage not in _tables:
        _tables[stage] = SliceTable(stage.slices, num_q, stage.num_keys)
    return _tables[stage]


def _check_local(q: Tensor, k: Tensor, v: Tensor, plan: AttnPlan) -> None:
    check_qkv(q, k, v)
    tokens = plan.dispatch.num_local_tokens
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x) != tokens:
            raise ValueError(
                f"{name} must hold this rank's {tokens} tokens, got {len(x)}; "
                f"dispatch the sequence with this plan first"
            )
