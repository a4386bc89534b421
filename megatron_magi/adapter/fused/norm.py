"""RMSNorm whose backward pass reads rows once: dx, and the weight's gradient in partial sums.

torch's backward takes two kernels that each read the rows and their gradients. Here sums over rows
are added in a fixed order, so two runs give equal bits.

In a transformer layer the rows of a norm go past it too, to the addition behind attention or MLP.
Autograd adds the two gradients by a kernel that reads both and writes their sum. Here the rows that
go past the norm are a second output of it, so its backward kernel adds their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_magi.adapter.rms_norm import RMSNorm
from megatron_magi.core.kernel.autograd import differentiable_once

PROGRAMS = 396
"""Number of programs of the backward pass, each with a partial sum of the weight's gradient: three
for each of an H200's multiprocessors."""

SUMMED = (128, 16)
"""Rows and columns of the partial sums that a program adds at a time."""

WIDEST = 16384
"""The most columns of a row that a program holds in registers."""

PAST_NORM = "_magi_past_norm"
"""Attribute of a norm's input: the same rows as an output of the norm."""

NORMED = "_magi_normed"
"""Attribute of a norm's input: what the addition that wrote it computed for the norm."""

_saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class FusedRMSNorm(RMSNorm):
    """`RMSNorm` with the same parameters, for rows of up to WIDEST columns.

    With gradient_accumulation_fusion its weight's gradient is added to ``main_grad`` in fp32.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, **more: Any) -> None:
        super().__init__(config, hidden_size, **more)
        self.into_main_grad = getattr(config, "gradient_accumulation_fusion", False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        ready = take_normed(x, self)
        if ready is not None:
            return ready
        return rms_norm(x, self.weight, self.eps, self.into_main_grad)


class BlockRMSNorm(FusedRMSNorm):
    """The norm before attention or MLP, in a layer that adds by `add_rows_past_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype; leaves the rows for the addition."""
        ready = take_normed(x, self)
        if ready is not None:
            return ready
        out, past = rms_norm_and_rows(x, self.weight, self.eps, self.into_main_grad)
        if torch.is_grad_enabled() and past.requires_grad:  # not when it is computed again later
            setattr(x, PAST_NORM, past)
        return out


@dataclass(frozen=True)
class Normed:
    """Rows that were normalised before their norm was called, and for what they hold."""

    out: Tensor
    norm: FusedRMSNorm
    state: tuple[Any, ...]
    """`state_of` the rows and the weight when they were read."""


def state_of(x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """What must be the same at the addition and at the norm.

    How often rows and weight were changed in place, and who keeps the tensors of a backward pass:
    torch's checkpoint numbers them, so what it computes again must save as many as at first.
    """
    return x._version, weight._version, _saving_hooks(True)


def take_normed(x: Tensor, norm: FusedRMSNorm) -> Tensor | None:
    """The rows of x that an addition normalised for this norm; None: the norm must do it.

    They are taken once, and only if rows and weight are unchanged since then, in the same part of
    torch's checkpoint. Rows with a graph are not taken where gradients are off, since what is
    computed there is computed again later.
    """
    ready: Normed | None = x.__dict__.pop(NORMED, None)
    if ready is None or ready.norm is not norm:
        return None
    if ready.state != state_of(x, norm.weight):
        return None
    return None if ready.out.requires_grad and not torch.is_grad_enabled() else ready.out


def add_rows_past_norm(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Megatron's addition of bias and residual, with the rows that `BlockRMSNorm` left."""
    add = get_bias_dropout_add(training, fused)

    def add_past_norm(x_with_bias: Any, residual: Tensor, prob: float) -> Tensor:
        past = residual.__dict__.pop(PAST_NORM, residual)
        out: Tensor = add(x_with_bias, past, prob)
        return out

    return add_past_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float, into_main_grad: bool = False) -> Tensor:
    """x / sqrt(mean of squares + eps) * weight, computed in fp32 and rounded once.

    Args:
        x: [..., width].
        weight: [width].
        into_main_grad: whether the backward pass adds the weight's gradient to weight.main_grad,
            where Megatron's wrapper has given it one. autograd then gets no values.

    Raises:
        ValueError: a weight of another width, or one above WIDEST.
    """
    return rms_norm_and_rows(x, weight, eps, into_main_grad)[0]


def rms_norm_and_rows(
    x: Tensor, weight: Tensor, eps: float, into_main_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """`rms_norm`, and the rows of x themselves, whose gradient its backward kernel adds.

    Raises:
        ValueError: as `rms_norm`.
    """
    if weight.shape != x.shape[-1:] or weight.numel() > WIDEST:
        raise ValueError(
            f"the fused RMSNorm requires a weight of {x.shape[-1]} columns, at most {WIDEST:,}, "
            f"got {list(weight.shape)}; set model.fused=off"
        )
    out, past = _RMSNorm.apply(x, weight, eps, into_main_grad)
    return out, past


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, into_main_grad: bool
    ) -> tuple[Tensor, Tensor]:
        past = x.detach()  # a view would hold x
        x = x.contiguous()
        out, inverse = normalize(x, weight, eps)
        # Detached: x may carry `past`, whose graph must not keep x alive.
        ctx.save_for_backward(x.detach(), weight, inverse)
        ctx.into_main_grad = into_main_grad and weight.requires_grad
        ctx.set_materialize_grads(False)
        return out, past

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, past = grads
        if grad is None:
            return past, None, None, None
        return *gradients(ctx.saved_tensors, grad, past, ctx.into_main_grad), None, None


class AddAndNormalize(torch.autograd.Function):
    """x, residual, weight, eps, into_main_grad -> x + residual in their dtype, and its norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, into_main_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """x, residual [..., width], contiguous, of one dtype -> two of that shape."""
        total = torch.empty_like(x)
        out, inverse = normalize(x, weight, eps, (residual, total))
        ctx.save_for_backward(total, weight, inverse)
        ctx.into_main_grad = into_main_grad and weight.requires_grad
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient of both addends is one tensor, as autograd's for an addition is."""
        past, grad = grads
        if grad is None:
            return past, past, None, None, None
        dx, dweight = gradients(ctx.saved_tensors, grad, past, ctx.into_main_grad)
        return dx, dx, dweight, None, None


def normalize(
    x: Tensor, weight: Tensor, eps: float, residual_and_total: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of contiguous x, and float32 [rows], the inverse root of each row's mean square.

    With residual_and_total, of x's shape, the sum x + residual is written to total and normalised.
    """
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    out = torch.empty_like(x)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    residual, total = residual_and_total or (x, x)
    _normalize[(rows,)](
        x, residual, weight, total, out, inverse, eps, width,
        adds=residual_and_total is not None, **_shape(width),
    )  # fmt: skip
    return out, inverse


def gradients(
    saved: tuple[Tensor, ...], grad: Tensor, past: Tensor | None, into_main_grad: bool
) -> tuple[Tensor, Tensor]:
    """dx and dweight of a norm, from its saved x, weight and inverse; dx includes past."""
    x, weight, inverse = saved
    rows, width = len(inverse), x.shape[-1]
    programs = min(PROGRAMS, rows)  # 0: no launch, and a sum of nothing
    dx = torch.empty_like(x)
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    grad = grad.contiguous()
    _normalize_gradient[(programs,)](
        x, weight, inverse, grad, grad if past is None else past.contiguous(), dx, partial,
        rows, width, adds=past is not None, **_shape(width),
    )  # fmt: skip
    return dx, _weight_gradient(partial, weight, into_main_grad)


def _weight_gradient(partial: Tensor, weight: Any, into_main_grad: bool) -> Tensor:
    """The sum of the partial ones in the weight's dtype; without values if main_grad has it."""
    # Like Megatron's linear layers, only where its wrapper will see the mark.
    adds = into_main_grad and hasattr(weight, "main_grad")
    adds = adds and hasattr(weight, "grad_added_to_main_grad")
    dweight = torch.empty_like(weight)
    programs, width = partial.shape
    _sum_rows[(triton.cdiv(width, SUMMED[1]),)](
        partial, weight.main_grad if adds else dweight, programs, width,
        adds=adds, rows_each=SUMMED[0], block=SUMMED[1], num_warps=8,
    )  # fmt: skip
    if adds:
        weight.grad_added_to_main_grad = True
    return dweight


def _shape(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    # 8 columns of a thread are one load; 16 warps may hold more columns, but in registers only 16.
    return {"block": block, "num_warps": max(1, min(16, block // 256), block // 512)}


@triton.jit  # type: ignore[untyped-decorator]
def _normalize(  # type: ignore[no-untyped-def]
    x, residual, weight, total, out, inverse, eps, width, adds: tl.constexpr, block: tl.constexpr
):
    """Each program normalises one row, of x or of the rounded sum of x and residual."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    at = row * width + column
    values = tl.load(x + at, mask=inside, other=0.0)
    if adds:
        more = tl.load(residual + at, mask=inside, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(total + at, values, mask=inside)
    values = values.to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    tl.store(inverse + row, scale)
    tl.store(out + at, values * scale * w, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _normalize_gradient(  # type: ignore[no-untyped-def]
    x, weight, inverse, grad, past, dx, partial, num_rows, width,
    adds: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Each program computes every num_programs-th row of dx, and their share of the weight's
    gradient.

    The next row is loaded before this one is used, so that loads are under way at all times.
    """
    program, step = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, block)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([block], dtype=tl.float32)
    end = tl.cast(num_rows, tl.int64) * width
    at = tl.cast(program, tl.int64) * width + column
    x_next = tl.load(x + at, mask=inside, other=0.0)
    grad_next = tl.load(grad + at, mask=inside, other=0.0)
    scale_next = tl.load(inverse + program)
    if adds:
        past_next = tl.load(past + at, mask=inside, other=0.0)
    for row in range(program, num_rows, step):
        at = tl.cast(row, tl.int64) * width + column
        row_next = row + step
        following = tl.cast(row_next, tl.int64) * width + column
        is_inside = inside & (following < end)
        scale = scale_next
        normal = x_next.to(tl.float32) * scale
        g = grad_next.to(tl.float32)
        x_next = tl.load(x + following, mask=is_inside, other=0.0)
        grad_next = tl.load(grad + following, mask=is_inside, other=0.0)
        scale_next = tl.load(inverse + row_next, mask=row_next < num_rows, other=0.0)
        if adds:
            added = past_next
            past_next = tl.load(past + following, mask=is_inside, other=0.0)
        dweight += g * normal
        g *= w
        along = tl.sum(g * normal, axis=0) / width
        change = (g - normal * along) * scale
        if adds:
            change += added.to(tl.float32)
        tl.store(dx + at, change, mask=inside)
    tl.store(partial + program.to(tl.int64) * width + column, dweight, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(  # type: ignore[no-untyped-def]
    rows, out, num_rows, width, adds: tl.constexpr, rows_each: tl.constexpr, block: tl.constexpr
):
    """Each program sums up some columns, `rows_each` rows at a time, on top of `out` if it adds."""
    column = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([rows_each, block], dtype=tl.float32)
    for first in range(0, num_rows, rows_each):
        row = first + tl.arange(0, rows_each)
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        total += tl.load(rows + at, mask=inside, other=0.0)
    result = tl.sum(total, axis=0)
    if adds:
        result += tl.load(out + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + column, result, mask=column < width)
