"""Shifting a dispatched sequence in global order, for multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.checks import integer
from megatron_magi.core.comm.group_cast import group_cast
from megatron_magi.core.comm.prepared_cast import PreparedCast, prepare_casts
from megatron_magi.core.comm.process_group import CpGroup, group_rank, resolve_group
from megatron_magi.core.comm.transport import AllToAll
from megatron_magi.core.cuda.tables import DeviceTable, upload_together
from megatron_magi.core.kernel.autograd import (
    differentiable_once,
    one_graph_break,
    refuse_transforms,
)
from megatron_magi.core.plan import AttnPlan, TokenLayout, make_shift_plan
from megatron_magi.core.runtime.prepared import cached_on
from megatron_magi.core.runtime.token_dispatch import (
    check_group,
    check_tokens,
    compare_rows,
    through_bits,
)


@one_graph_break
def shift_tokens(
    x_local: Tensor, shift: int, plan: AttnPlan, cp_group: CpGroup, dim: int = 0
) -> Tensor:
    """``torch.roll(x, -shift)`` of the full sequence, on dispatched tokens; differentiable.

    Local token i becomes global token ``(position_i + shift) mod total_seqlen``; pad rows keep
    their values.

    Args:
        x_local: ``num_local_tokens`` tokens in ``dim``.
        shift: a positive shift moves later tokens to earlier places (labels of the next token: 1).

    Cost: only rows that another rank holds are sent, each once.
    """
    refuse_transforms()
    check_group(plan, cp_group)
    shift = integer(shift, "shift")
    dim = check_tokens(x_local, dim, plan.layout.num_local_tokens, "this rank's tokens")
    out: Tensor = _ShiftTokens.apply(x_local, shift, plan, cp_group, dim)
    return out


class _ShiftTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shift: int, plan: AttnPlan, cp_group: CpGroup, dim: int
    ) -> Tensor:
        ctx.shift, ctx.plan, ctx.cp_group, ctx.dim = shift, plan, cp_group, dim
        compare_rows("shift_tokens", x, plan, cp_group, dim, shift)
        return _shift(x, shift, plan.layout, cp_group, dim)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        compare_rows("backward of shift_tokens", grad, ctx.plan, ctx.cp_group, ctx.dim, ctx.shift)
        shifted = _shift(grad, -ctx.shift, ctx.plan.layout, ctx.cp_group, ctx.dim)
        return shifted, None, None, None, None


@dataclass(frozen=True, eq=False, slots=True)
class _PreparedShift:
    """A ShiftPlan on one device."""

    cast: PreparedCast
    gather_index: DeviceTable


def _prepared_shift(
    layout: TokenLayout, shift: int, rank: int, device: torch.device
) -> _PreparedShift:
    """The shift's tables on a device, built once per layout and shift."""

    def make() -> _PreparedShift:
        plan = make_shift_plan(layout, shift, rank)
        (cast,) = prepare_casts([plan.cast], device, reduced=())
        assert isinstance(cast, PreparedCast)
        return _PreparedShift(cast, *upload_together([plan.gather_index], device))

    return cached_on(layout, ("shift", shift, rank, device), make)


def _shift(x: Tensor, shift: int, layout: TokenLayout, cp_group: CpGroup, dim: int) -> Tensor:
    ready = _prepared_shift(layout, shift, group_rank(cp_group), x.device)
    rows = x.movedim(dim, 0)
    flat = rows.reshape(len(rows), -1).contiguous()
    shifted = through_bits(lambda rows: _shift_rows(rows, ready, resolve_group(cp_group)), flat)
    return shifted.view(rows.shape).movedim(0, dim)


def _shift_rows(flat: Tensor, ready: _PreparedShift, group: dist.ProcessGroup | None) -> Tensor:
    (received,) = group_cast([flat], ready.cast, AllToAll(group)).wait()
    return torch.cat([flat, received]).index_select(0, ready.gather_index.here())
