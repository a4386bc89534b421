"""silu(gate) * up and its gradient, each read and written once.

Megatron's bias_activation_fusion leaves the gradient to torch's compiler, whose kernel computes
both halves for every element that it writes and reaches half of the memory's bandwidth. Megatron
calls this module where it would call TransformerEngine's activation (`use_te_activation_func`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_magi.core.kernel.autograd import differentiable_once

BLOCK = 1024
"""Number of columns of each half that a program handles, in one row."""


class SwiGLU(torch.nn.Module):
    """[..., 2 * width], all gates first -> [..., width], same dtype."""

    def __init__(self, config: Any) -> None:
        check_fits(config)
        super().__init__()

    def forward(self, mixed: Tensor) -> Tensor:
        """mixed [..., 2 * width] -> [..., width]."""
        return swiglu(mixed)


def check_fits(config: Any) -> None:
    """Raise NotImplementedError for an activation that is more than SwiGLU."""
    wanted = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    wanted |= {"activation_func_clamp_value": None, "activation_func_fp8_input_store": False}
    other = {n: v for n, want in wanted.items() if (v := getattr(config, n, want)) != want}
    if other:
        raise NotImplementedError(
            f"the fused SwiGLU requires silu with gated_linear_unit, without clamping or fp8 "
            f"storage, got {other}; set model.fused=off"
        )


def swiglu(mixed: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension; computed in fp32, rounded once."""
    out: Tensor = _SwiGLU.apply(mixed)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor) -> Tensor:
        mixed = mixed.contiguous()
        ctx.save_for_backward(mixed)
        out = mixed.new_empty(*mixed.shape[:-1], mixed.shape[-1] // 2)
        _swiglu[_grid(out)](mixed, out, out.shape[-1], BLOCK)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:
        (mixed,) = ctx.saved_tensors
        (grad,) = grads
        dmixed = torch.empty_like(mixed)
        _swiglu_gradient[_grid(grad)](mixed, grad.contiguous(), dmixed, grad.shape[-1], BLOCK)
        return (dmixed,)


def _grid(out: Tensor) -> tuple[int, int]:
    width = out.shape[-1]
    return out.numel() // max(width, 1), triton.cdiv(width, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(mixed, out, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program handles `block` columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    at = mixed + row * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_gradient(mixed, grad, dmixed, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program handles `block` columns of both halves of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    at = row * 2 * width + column
    gate = tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(mixed + at + width, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    open_part = tl.sigmoid(gate)
    dgate = g * up * open_part * (1 + gate * (1 - open_part))
    tl.store(dmixed + at, dgate, mask=inside)
    tl.store(dmixed + at + width, g * gate * open_part, mask=inside)
