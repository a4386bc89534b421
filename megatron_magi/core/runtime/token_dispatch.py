"""Moving tokens to their ranks and back: dispatch, undispatch, position ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.checks import flag, integer, is_integer_like, word
from megatron_magi.core.comm.process_group import CpGroup, group_rank, group_size, resolve_group
from megatron_magi.core.cuda.tables import DeviceTable, upload_together
from megatron_magi.core.kernel.autograd import (
    differentiable_once,
    one_graph_break,
    refuse_transforms,
)
from megatron_magi.core.plan import AttnPlan, TokenLayout
from megatron_magi.core.plan.attn_plan import check_plan
from megatron_magi.core.runtime.agreement.comparison import begin_comparing, compare
from megatron_magi.core.runtime.agreement.signature import Call
from megatron_magi.core.runtime.prepared import cached_on
from megatron_magi.core.tensor_checks import device as checked_device
from megatron_magi.core.tensor_checks import fill, tensor

Side = Literal["queries", "keys"]


class _Place(NamedTuple):
    plan: AttnPlan
    """Ranks compare it."""
    layout: TokenLayout
    """That of the tokens: the plan's queries or its keys."""


@one_graph_break
def dispatch(
    x: Tensor,
    plan: AttnPlan,
    cp_group: CpGroup,
    dim: int = 0,
    pad_value: float = 0,
    *,
    side: Side = "queries",
) -> Tensor:
    """This rank's tokens of a full sequence, in local order; differentiable.

    Args:
        x: ``total_seqlen`` tokens in ``dim``, the same on every rank.
        plan: the plan of this sequence.
        cp_group: the context-parallel group, a 1-D or 2-D mesh, or None for one rank.
        pad_value: fills the rows after the end of the sequence.
        side: the sequence of a cross-attention: "queries" or "keys". In self-attention both are
            the same.

    Returns:
        x with ``num_local_tokens`` tokens in ``dim``, those of ``plan.layout`` or
        ``plan.key_layout``.

    Raises:
        ValueError: another number of tokens, or a group of another size than the plan's.
        NotImplementedError: a call inside of a transform of torch.func.

    Cost: nothing is sent, but a group's first call waits for its ranks; the backward gathers the
    gradient on every rank.
    """
    refuse_transforms()
    check_group(plan, cp_group)
    layout = layout_of(plan, side)
    dim = check_tokens(x, dim, layout.total_seqlen, "the full sequence")
    pad_value = fill(pad_value, x, "pad_value")
    if layout.total_seqlen == 0:
        raise ValueError("dispatch needs at least one token, got an empty sequence; skip the batch")
    begin_comparing(plan, cp_group)
    out: Tensor = _Dispatch.apply(x, _Place(plan, layout), cp_group, dim, pad_value)
    return out


@one_graph_break
def undispatch(
    x_local: Tensor,
    plan: AttnPlan,
    cp_group: CpGroup,
    dim: int = 0,
    *,
    is_partial_grad: bool = False,
    side: Side = "queries",
) -> Tensor:
    """The full sequence on every rank, gathered from the ranks' local tokens; differentiable.

    Args:
        x_local: ``num_local_tokens`` tokens in ``dim``.
        is_partial_grad: True if the gradient of the result differs from rank to rank and must be
            summed; False if every rank computes the same gradient, so that each takes its own part.
        side: as in ``dispatch``.

    Returns:
        x with ``total_seqlen`` tokens in ``dim``, without padding.

    Cost: one all-gather; with ``is_partial_grad`` the backward adds an all-reduce.
    """
    refuse_transforms()
    check_group(plan, cp_group)
    layout = layout_of(plan, side)
    dim = check_tokens(x_local, dim, layout.num_local_tokens, "this rank's tokens")
    is_partial_grad = flag(is_partial_grad, "is_partial_grad")
    out: Tensor = _Undispatch.apply(x_local, _Place(plan, layout), cp_group, dim, is_partial_grad)
    return out


def position_ids(
    plan: AttnPlan,
    cp_group: CpGroup | int,
    device: torch.device | str = "cpu",
    *,
    side: Side = "queries",
) -> Tensor:
    """int64 [num_local_tokens]: the global position of each local token.

    Pad rows get the last position, so the result may index tables of ``total_seqlen`` entries.

    Args:
        cp_group: the group, or a rank's number.
        side: as in ``dispatch``.
    """
    check_plan(plan)
    if isinstance(cp_group, int) or is_integer_like(cp_group):
        rank = integer(cp_group, "cp_group as a rank", 0, plan.cp_size - 1)
    else:
        check_group(plan, cp_group)
        rank = group_rank(cp_group)
    # A copy, so that the caller may change it, or save it for backward after inference.
    return _local_index(layout_of(plan, side), rank, checked_device(device))[0].clone()


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, at: _Place, cp_group: CpGroup, dim: int, pad_value: float
    ) -> Tensor:
        (ctx.plan, ctx.layout), ctx.cp_group, ctx.dim = at, cp_group, dim
        return _select(x, ctx.layout, group_rank(cp_group), dim, pad_value)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        compare_rows("backward of dispatch", grad, ctx.plan, ctx.cp_group, ctx.dim)
        return _gather(grad, ctx.layout, ctx.cp_group, ctx.dim), None, None, None, None


class _Undispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_local: Tensor, at: _Place, cp_group: CpGroup, dim: int, partial: bool
    ) -> Tensor:
        (ctx.plan, ctx.layout), ctx.cp_group, ctx.dim, ctx.partial = at, cp_group, dim, partial
        compare_rows("undispatch", x_local, ctx.plan, cp_group, dim, int(partial))
        return _gather(x_local, ctx.layout, cp_group, dim)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group = resolve_group(ctx.cp_group)
        if ctx.partial and group is not None:
            compare_rows("backward of undispatch", grad, ctx.plan, group, ctx.dim)
            # A copy, because other branches of the graph may use the gradient too.
            grad = grad.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(grad, group=group)
        local = _select(grad, ctx.layout, group_rank(ctx.cp_group), ctx.dim, 0)
        return local, None, None, None, None


def compare_rows(
    kind: str, x: Tensor, plan: AttnPlan, cp_group: CpGroup, dim: int, extra: int = 0
) -> None:
    """Compare with the other ranks before the rows of ``x`` along ``dim`` are exchanged."""
    row = x.movedim(dim, 0).shape[1:]
    compare(Call(kind, tuple(row), x.dtype, extra=extra), plan, cp_group, x.device).wait()


def through_bits(move: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``move(x)``, where ``move`` only copies elements. x is viewed as integers of the same size if
    PyTorch cannot select or fill rows of its dtype (fp8, and unsigned integers of several bytes).
    """
    bits = _bits_of(x.dtype)
    return move(x) if bits is None else move(x.view(bits)).view(x.dtype)


def _bits_of(dtype: torch.dtype) -> torch.dtype | None:
    """The integers in whose form rows of a dtype are moved; None: its own."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.uint8
    return _SIGNED.get(dtype)


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _select(x: Tensor, layout: TokenLayout, rank: int, dim: int, pad_value: float) -> Tensor:
    bits = _bits_of(x.dtype)
    if bits is not None:  # also on ranks without padding, so that an error comes on every rank
        pad_value = torch.tensor(pad_value, dtype=x.dtype, device="cpu").view(bits).item()
    return through_bits(lambda rows: _select_rows(rows, layout, rank, dim, pad_value), x)


def _select_rows(x: Tensor, layout: TokenLayout, rank: int, dim: int, pad_value: float) -> Tensor:
    index, is_pad = _local_index(layout, rank, x.device)
    local = x.index_select(dim, index)
    if is_pad is not None:
        local = local.index_fill(dim, is_pad, pad_value)
    return local


# torch 2.13 renamed the function, and warns at every call of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _gather(x_local: Tensor, layout: TokenLayout, cp_group: CpGroup, dim: int) -> Tensor:
    group = resolve_group(cp_group)
    rows = x_local.movedim(dim, 0).resolve_conj().resolve_neg().contiguous()
    return through_bits(lambda x: _gather_rows(x, layout, group), rows).movedim(0, dim)


def _gather_rows(rows: Tensor, layout: TokenLayout, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        everything = rows.new_empty((layout.padded_seqlen, *rows.shape[1:]))
        # Sent as bytes, because gloo does not support int16.
        _all_gather(everything.view(torch.uint8), rows.view(torch.uint8), group=group)
        rows = everything
    return rows.index_select(0, _inverse(layout, rows.device))


def _local_index(
    layout: TokenLayout, rank: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """(clamped global positions of the local rows, local rows that are padding or None)."""

    def make() -> list[DeviceTable]:
        positions = layout.position_ids(rank)
        pads = np.flatnonzero(positions >= layout.total_seqlen)
        return upload_together([positions.clip(max=layout.total_seqlen - 1), pads], device)

    index, pads = cached_on(layout, ("local rows", rank, device), make)
    return index.here(), pads.here() if pads.data.shape[0] else None


def _inverse(layout: TokenLayout, device: torch.device) -> Tensor:
    """int64 [total_seqlen]: where each token lies in the ranks' concatenated rows."""

    def make() -> list[DeviceTable]:
        return upload_together([layout.permutation().argsort()[: layout.total_seqlen]], device)

    return cached_on(layout, ("inverse", device), make)[0].here()


def layout_of(plan: AttnPlan, side: Side) -> TokenLayout:
    """The layout of a plan's queries or keys."""
    return plan.key_layout if word(side, "side", get_args(Side)) == "keys" else plan.layout


def check_group(plan: AttnPlan, cp_group: CpGroup) -> None:
    check_plan(plan)
    size = group_size(cp_group)
    if size != plan.layout.cp_size:
        raise ValueError(
            f"the plan is for {plan.layout.cp_size} context-parallel ranks, got a group of "
            f"{size}; plan with this group"
        )


def check_tokens(x: Tensor, dim: int, expected: int, what: str) -> int:
    """Check that ``dim`` of x holds the expected tokens, and return it as an int."""
    tensor(x, "x")
    dim = integer(dim, "dim")
    if not -x.ndim <= dim < x.ndim or x.shape[dim] != expected:
        raise ValueError(
            f"dimension {dim} must hold {what} ({expected} tokens), got shape {list(x.shape)}; "
            f"pass the tensor the plan was made for, or another dim"
        )
    return dim
