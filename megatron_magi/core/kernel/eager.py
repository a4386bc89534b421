"""The op as eager calls run it: straight to the backend.

PyTorch's Python dispatch and autograd of a ``torch.library`` op take longer than the launch itself.
Whoever has to see the op still gets it; see ``calls.must_dispatch``. Shapes as in ``ops.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_magi.core.kernel import ops
from megatron_magi.core.kernel.backend import OutLse
from megatron_magi.core.kernel.calls import differentiable_once, must_dispatch
from megatron_magi.core.kernel.row_delta import score_delta


class Attend(NamedTuple):
    """The arguments of ``flex_attn_fwd`` behind its tensors, in its order."""

    softmax_scale: float
    out_dtype: torch.dtype
    backend: str
    deterministic: bool


def attend(q: Tensor, k: Tensor, v: Tensor, slices: Tensor, how: Attend) -> OutLse:
    """(out, lse), differentiable in q, k and v."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, lse = _EagerAttn.apply(q, k, v, slices, how)
        return out, lse
    return ops.forward(q, k, v, slices, *how)


class _EagerAttn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, slices: Tensor, how: Attend) -> OutLse:
        out, lse = ops.forward(q, k, v, slices, *how)
        # What the dispatched op saves, in its order: a checkpoint may run one and then the other.
        ctx.save_for_backward(q, k, v, ops.saveable(slices), out, lse)
        ctx.set_materialize_grads(False)
        ctx.how = how
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, slices, out, lse = ctx.saved_tensors
        scale, _, *choice = ctx.how
        dout = torch.zeros_like(out) if dout is None else dout
        seen = must_dispatch(q, k, v, dout, *(() if dlse is None else (dlse,)))
        if dlse is None and not seen:  # the kernels make delta on their way
            grads = ops.backward(dout, q, k, v, lse, None, slices, scale, *choice, out=out)
            return *grads, None, None
        delta = score_delta(out, dout, dlse, lse.dtype)
        run = torch.ops.magi.flex_attn_bwd if seen else ops.backward
        return *run(dout, q, k, v, lse, delta, slices, scale, *choice), None, None
