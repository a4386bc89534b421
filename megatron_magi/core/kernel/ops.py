"""The kernels as torch.library ops, so that torch.compile, meta tensors and autograd see them.

T query tokens, S key tokens, H query heads, G key/value heads, D head_dim (values and
their output may have one of their own), N slices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_magi.core.kernel.backend import acc_dtype, has_one_width, select_backend
from megatron_magi.core.kernel.calls import refuse_second_derivative
from megatron_magi.core.kernel.row_delta import score_delta
from megatron_magi.core.kernel.slice_table import slice_table

_library = torch.library.Library("magi", "DEF")
_library.define(
    "flex_attn_fwd(Tensor q, Tensor k, Tensor v, Tensor slices, float softmax_scale, "
    "ScalarType out_dtype, str backend, bool deterministic) -> (Tensor out, Tensor lse)"
)
_library.define(
    "flex_attn_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor delta, "
    "Tensor slices, float softmax_scale, str backend, bool deterministic) "
    "-> (Tensor dq, Tensor dk, Tensor dv)"
)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Tensor,
    softmax_scale: float,
    out_dtype: torch.dtype,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    table = slice_table(slices, q.shape[0], k.shape[0])
    kernel = select_backend(backend, q.device, q.dtype, deterministic, has_one_width(q, v))
    return kernel.forward(q, k, v, table, softmax_scale, out_dtype=out_dtype)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor | None,
    slices: Tensor,
    softmax_scale: float,
    backend: str,
    deterministic: bool,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    table = slice_table(slices, q.shape[0], k.shape[0])
    kernel = select_backend(backend, q.device, q.dtype, deterministic, has_one_width(q, v))
    return kernel.backward(
        dout, q, k, v, lse, delta, table, softmax_scale, out=out, grad_dtype=q.dtype
    )


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, slices: Tensor, softmax_scale: float, out_dtype: torch.dtype,
    backend: str, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = q.new_empty((*q.shape[:2], v.shape[2]), dtype=out_dtype)
    return out, q.new_empty(q.shape[:2], dtype=acc_dtype(q.dtype))


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, slices: Tensor,
    softmax_scale: float, backend: str, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, slices, ctx.softmax_scale, _, ctx.backend, ctx.deterministic = inputs
    ctx.save_for_backward(q, k, v, saveable(slices), *output)


def saveable(slices: Tensor) -> Tensor:
    """Autograd does not save what was made in inference mode; a mask may well have been."""
    return slices.clone() if slices.is_inference() else slices


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, slices, out, lse = ctx.saved_tensors
    delta = score_delta(out, dout, dlse, lse.dtype)
    dq, dk, dv = torch.ops.magi.flex_attn_bwd(
        dout, q, k, v, lse, delta, slices, ctx.softmax_scale, ctx.backend, ctx.deterministic
    )
    return dq, dk, dv, None, None, None, None, None


_library.impl("flex_attn_fwd", forward, "CompositeExplicitAutograd")
_library.impl("flex_attn_bwd", backward, "CompositeExplicitAutograd")
torch.library.register_fake("magi::flex_attn_fwd", _fake_forward, lib=_library)
torch.library.register_fake("magi::flex_attn_bwd", _fake_backward, lib=_library)
torch.library.register_autograd(
    "magi::flex_attn_fwd", _differentiate, setup_context=_save, lib=_library
)
torch.library.register_autograd("magi::flex_attn_bwd", refuse_second_derivative, lib=_library)
