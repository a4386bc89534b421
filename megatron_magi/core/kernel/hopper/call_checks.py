"""Checks of the Hopper kernels beyond ``check_qkv``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_magi.core.kernel.backend import AttnCall, GradCall, OutLse
from megatron_magi.core.kernel.head_dims import (
    HeadDims,
    compiled_widths,
    too_wide,
    widths_of,
)
from megatron_magi.core.kernel.hopper.launch_values import is_aligned

DTYPES = (torch.bfloat16, torch.float16)
MIN_SCALE = {torch.bfloat16: 1e-30, torch.float16: 1e-6}
"""The least softmax_scale, by dtype: the backward divides lse by it and keeps the quotient in parts
of this dtype."""
SOFTCAPS = (1e-6, 1e6)
"""The least and the greatest softcap: its quotients with usual scales, and its product with
log2(e), are normal numbers of fp32."""


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse GPUs and dtypes without kernels.

    Raises:
        NotImplementedError: not a Hopper GPU, or a dtype without kernels.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        raise NotImplementedError(
            f"the CUDA kernels need a Hopper GPU (compute capability 9.0), got "
            f"{capability[0]}.{capability[1]} on {device}; use the backend 'flex'"
        )
    if dtype not in DTYPES:
        raise NotImplementedError(
            f"the CUDA kernels take bf16 and fp16, got {dtype}; cast the inputs or use "
            f"the backend 'reference'"
        )


def widths_for(call: AttnCall) -> HeadDims:
    """The compiled widths that hold the heads of a call.

    Raises:
        NotImplementedError: there are none.
    """
    found = compiled_widths(widths_of(call.q, call.v))
    if found is None:
        raise NotImplementedError(too_wide(widths_of(call.q, call.v)))
    return found


def check_call(call: AttnCall) -> None:
    """Check dtype, lengths and scale."""
    q, k, _, table, softmax_scale, *_ = call
    if q.dtype not in DTYPES:
        raise TypeError(f"the CUDA kernels take bf16 and fp16, got {q.dtype}; cast q, k and v")
    if q.shape[0] != table.num_q or k.shape[0] != table.num_k:
        raise ValueError(
            f"q and k must have the lengths the slices were made for, {table.num_q} and "
            f"{table.num_k}, got {q.shape[0]} and {k.shape[0]}; build the mask for these lengths"
        )
    least = MIN_SCALE.get(q.dtype, 0.0)
    if not least <= softmax_scale < math.inf:
        raise ValueError(
            f"softmax_scale must be at least {least} in {q.dtype} and finite, got {softmax_scale}; "
            f"move the sign or a smaller factor into q"
        )
    if call.softcap and not SOFTCAPS[0] <= call.softcap <= SOFTCAPS[1]:
        raise ValueError(
            f"softcap must be 0.0 or between {SOFTCAPS[0]} and {SOFTCAPS[1]} in the CUDA kernels, "
            f"got {call.softcap}; leave it out or use the backend 'reference'"
        )


def check_output(
    call: AttnCall, prev: OutLse | None, into: OutLse | None, out_dtype: torch.dtype | None
) -> None:
    """Check the output dtype, an earlier result to merge into, or one whose other rows stay."""
    q, given = call.q, into if prev is None else prev
    if given is None:
        if out_dtype not in (None, q.dtype, torch.float32):
            raise TypeError(
                f"out_dtype must be {q.dtype} or torch.float32, got {out_dtype}; cast the result"
            )
        return
    out, lse = given
    if prev is not None and out.dtype != torch.float32:
        raise TypeError(
            f"an earlier result must be fp32 to continue from, got out {out.dtype}; "
            f"ask for out_dtype=torch.float32 in the first stage"
        )
    if out.dtype not in (q.dtype, torch.float32) or lse.dtype != torch.float32:
        raise TypeError(
            f"an earlier result must be out in {q.dtype} or fp32 and lse in fp32, got "
            f"{out.dtype} and {lse.dtype}; pass what the first stage returned"
        )
    shape = [*q.shape[:2], call.v.shape[-1]]
    if list(out.shape) != shape or lse.shape != q.shape[:2] or out.stride(2) != 1:
        raise ValueError(
            f"an earlier result must be out {shape} (last dimension contiguous) and lse "
            f"{list(q.shape[:2])}, got {list(out.shape)} with strides {list(out.stride())} and "
            f"{list(lse.shape)}; pass what the first stage returned"
        )


def check_gradients(call: AttnCall, grad: GradCall) -> None:
    """Check what the backward demands beyond ``check_call``."""
    q, delta, out = call.q, grad.delta, grad.out
    if grad.dtype not in (None, torch.float32, q.dtype):
        raise TypeError(
            f"gradients must be {q.dtype} or torch.float32, got {grad.dtype}; cast them"
        )
    if (delta is None) == (out is None):
        raise ValueError("either delta or out is required, got none or both; pass one of them")
    shape = [*q.shape[:2], call.v.shape[-1]]
    for name, x in (("dout", grad.dout), ("out", out)):
        if x is not None and (x.dtype != q.dtype or list(x.shape) != shape):
            raise TypeError(
                f"{name} must have q's dtype and the shape of out, {q.dtype} {shape}, got "
                f"{x.dtype} {list(x.shape)}; cast it"
            )
    for name, x in (("lse", grad.lse), ("delta", delta)):
        if x is None:
            continue
        if x.dtype != torch.float32 or x.shape != q.shape[:2]:
            raise TypeError(
                f"{name} must be fp32 {list(q.shape[:2])}, got {x.dtype} {list(x.shape)}; pass "
                f"what the forward returned"
            )
    if grad.dq is not None:
        _check_target("dq", grad.dq, q, torch.float32)
    for name, target, x in zip(("dk", "dv"), grad.dkv or (), call[1:3], strict=False):
        _check_target(name, target, x, grad.dtype or torch.float32)


def _check_target(name: str, grad: Tensor, x: Tensor, dtype: torch.dtype) -> None:
    if grad.dtype != dtype or grad.shape != x.shape or not is_aligned(grad):
        raise ValueError(
            f"{name} must be written to {dtype} {list(x.shape)} with 16-byte aligned rows, got "
            f"{grad.dtype} {list(grad.shape)} with strides {list(grad.stride())}; pass such a "
            f"tensor or leave it out"
        )
