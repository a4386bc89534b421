"""The largest scaled score of every head over the whole dispatched sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.core.comm.group_cast import group_cast
from megatron_magi.core.comm.process_group import CpGroup, group_rank, resolve_group
from megatron_magi.core.kernel.attention import scale_of
from megatron_magi.core.kernel.backend import acc_dtype
from megatron_magi.core.kernel.max_logits import max_logits
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.runtime.agreement import compare
from megatron_magi.core.runtime.agreement_signature import Call
from megatron_magi.core.runtime.prepared import prepared_for


@torch.no_grad()
def dist_max_logits(
    q: Tensor, k: Tensor, plan: AttnPlan, cp_group: CpGroup, softmax_scale: float | None = None
) -> Tensor:
    """[H], the same on every rank; not differentiable. Call it after ``dist_attn``, on every rank.

    Args:
        q: [T, H, D], this rank's tokens; k: [T, G, D].

    Cost: the key rows that this rank needs are received once more, then H numbers are all-reduced.
    """
    scale = scale_of(q, softmax_scale)
    group = resolve_group(cp_group)
    call = Call("dist_max_logits", tuple(k.shape[1:]), k.dtype, scale)
    compare(call, plan, group, q.device).wait()
    most = torch.full((q.shape[1],), -torch.inf, dtype=acc_dtype(q.dtype), device=q.device)
    for stage in prepared_for(plan, group_rank(cp_group), q.device).forward:
        keys = k
        if stage.cast is not None:
            (keys,) = group_cast((k,), stage.cast, group).wait()
        if stage.sees:
            most = torch.maximum(most, max_logits(q, keys, stage.table, scale))
    if group is not None:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return most
