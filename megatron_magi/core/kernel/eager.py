"""The op as eager calls run it: straight to the backend.

PyTorch's Python dispatch and autograd of a ``torch.library`` op take longer than the launch itself.
Whoever has to see the op still gets it; see ``calls.must_dispatch``. Shapes as in ``ops.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_magi.core.kernel.backend import OutLse, select_backend
from megatron_magi.core.kernel.calls import differentiable_once, must_dispatch
from megatron_magi.core.kernel.ops import saveable, score_delta
from megatron_magi.core.kernel.slice_table import SliceTable, slice_table


@dataclass(frozen=True)
class Attend:
    """The arguments of ``flex_attn_fwd`` behind its tensors."""

    softmax_scale: float
    out_dtype: torch.dtype
    backend: str
    deterministic: bool


def attend(q: Tensor, k: Tensor, v: Tensor, slices: Tensor, how: Attend) -> OutLse:
    """(out, lse), differentiable in q, k and v."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, lse = _EagerAttn.apply(q, k, v, slices, how)
        return out, lse
    return _forward(q, k, v, slice_table(slices, q.shape[0], k.shape[0]), how)


def _forward(q: Tensor, k: Tensor, v: Tensor, table: SliceTable, how: Attend) -> OutLse:
    kernel = select_backend(how.backend, q.device, q.dtype, how.deterministic)
    return kernel.forward(q, k, v, table, how.softmax_scale, out_dtype=how.out_dtype)


class _EagerAttn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, slices: Tensor, how: Attend) -> OutLse:
        ctx.table, ctx.how = slice_table(slices, q.shape[0], k.shape[0]), how
        out, lse = _forward(q, k, v, ctx.table, how)
        # What the dispatched op saves, in its order: a checkpoint may run one and then the other.
        ctx.save_for_backward(q, k, v, saveable(slices), out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, slices, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        delta = score_delta(out, dout, dlse, lse.dtype)
        return *_backward(dout, q, k, v, lse, delta, slices, ctx.table, ctx.how), None, None


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, slices: Tensor,
    table: SliceTable, how: Attend,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if must_dispatch(dout, delta, q, k, v):
        return torch.ops.magi.flex_attn_bwd(
            dout, q, k, v, lse, delta, slices, how.softmax_scale, how.backend, how.deterministic
        )
    kernel = select_backend(how.backend, q.device, q.dtype, how.deterministic)
    return kernel.backward(dout, q, k, v, lse, delta, table, how.softmax_scale, grad_dtype=q.dtype)
