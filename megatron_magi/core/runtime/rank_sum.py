"""A sum over context-parallel ranks whose gradient stays on the rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.core.comm.process_group import CpGroup, resolve_group


def sum_over_ranks(values: Tensor, cp_group: CpGroup) -> Tensor:
    """Sum a tensor over the ranks; the result is equal on all of them; differentiable.

    Every rank computes the same loss of the sum, so the gradient of the sum is already the gradient
    of each rank's values. The gradients of parameters are then each rank's share, to be summed over
    the group as those of any loss.

    Args:
        values: floating, of one shape on every rank.
        cp_group: the context-parallel group, or None for one rank.

    Cost: an all-reduce of the values; nothing in the backward.
    """
    out: Tensor = _SumOverRanks.apply(values, cp_group)
    return out


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, cp_group: CpGroup) -> Tensor:
        group = resolve_group(cp_group)
        values = values.clone()
        if group is not None:
            dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
