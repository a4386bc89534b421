"""RMSNorm whose backward pass reads rows once: dx, and the weight's gradient in partial sums.

torch's backward takes two kernels that each read the rows and their gradients. Here sums over rows
are added in a fixed order, so two runs give equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_magi.adapter.rms_norm import RMSNorm

PROGRAMS = 528
"""Number of programs of the backward pass, each with a partial sum of the weight's gradient: four
for each of an H200's multiprocessors."""

WIDEST = 16384
"""The most columns of a row that a program holds in registers."""


class FusedRMSNorm(RMSNorm):
    """`RMSNorm` with the same parameters, for rows of up to WIDEST columns."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean of squares + eps) * weight, computed in fp32 and rounded once.

    Args:
        x: [..., width].
        weight: [width].

    Raises:
        ValueError: a weight of another width, or one above WIDEST.
    """
    if weight.shape != x.shape[-1:] or weight.numel() > WIDEST:
        raise ValueError(
            f"the fused RMSNorm requires a weight of {x.shape[-1]} columns, at most {WIDEST:,}, "
            f"got {list(weight.shape)}; set model.fused=off"
        )
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        out = torch.empty_like(x)
        inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
        _normalize[(rows,)](x, weight, out, inverse, eps, width, **_shape(width))
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        (grad,) = grads
        rows, width = len(inverse), x.shape[-1]
        programs = max(1, min(PROGRAMS, rows))
        dx = torch.empty_like(x)
        partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        _normalize_gradient[(programs,)](
            x, weight, inverse, grad.contiguous(), dx, partial,
            rows, triton.cdiv(rows, programs), width, **_shape(width),
        )  # fmt: skip
        return dx, partial.sum(0).to(weight.dtype), None


def _shape(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"block": block, "num_warps": min(16, max(1, block // 256))}


@triton.jit  # type: ignore[untyped-decorator]
def _normalize(  # type: ignore[no-untyped-def]
    x, weight, out, inverse, eps, width, block: tl.constexpr
):
    """Each program normalises one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    values = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    tl.store(inverse + row, scale)
    tl.store(out + row * width + column, values * scale * w, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _normalize_gradient(  # type: ignore[no-untyped-def]
    x, weight, inverse, grad, dx, partial, num_rows, rows_each, width, block: tl.constexpr
):
    """Each program computes `rows_each` rows of dx, and their share of the weight's gradient."""
    program = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([block], dtype=tl.float32)
    first = program * rows_each
    for row in range(first, tl.minimum(first + rows_each, num_rows)):
        at = tl.cast(row, tl.int64) * width + column
        scale = tl.load(inverse + row)
        normal = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        dweight += g * normal
        g *= w
        along = tl.sum(g * normal, axis=0) / width
        tl.store(dx + at, (g - normal * along) * scale, mask=inside)
    tl.store(partial + program.to(tl.int64) * width + column, dweight, mask=inside)
