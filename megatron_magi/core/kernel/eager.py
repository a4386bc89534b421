"""The op as eager calls run it: straight to the backend.

PyTorch's Python dispatch and autograd of a ``torch.library`` op take longer than the launch itself.
Whoever has to see the op (compilers, dispatch modes, tensor subclasses) still gets it; see
``must_dispatch``. Shapes as in ``ops.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_magi.core.kernel.backend import AttnBackend, OutLse
from megatron_magi.core.kernel.ops import score_delta
from megatron_magi.core.kernel.slice_table import SliceTable


def must_dispatch(*tensors: Tensor) -> bool:
    """Whether somebody wants to see ``torch.ops.magi``: torch.compile, a dispatch mode (fake
    tensors, selective checkpointing, flop counters), a transform, or a tensor that is no plain one
    or has no memory."""
    return (
        any(type(x) is not Tensor or x.is_meta for x in tensors)
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: SliceTable,
    kernel: AttnBackend,
    softmax_scale: float,
    out_dtype: torch.dtype,
) -> OutLse:
    """(out, lse), differentiable in q, k and v."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, lse = _EagerAttn.apply(q, k, v, table, kernel, softmax_scale, out_dtype)
        return out, lse
    return kernel.forward(q, k, v, table, softmax_scale, out_dtype=out_dtype)


class _EagerAttn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: SliceTable, kernel: AttnBackend,
        softmax_scale: float, out_dtype: torch.dtype,
    ) -> OutLse:  # fmt: skip
        out, lse = kernel.forward(q, k, v, table, softmax_scale, out_dtype=out_dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call = table, kernel, softmax_scale
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        table, kernel, softmax_scale = ctx.call
        dout = torch.zeros_like(out) if dout is None else dout
        delta = score_delta(out, dout, dlse, lse.dtype)
        grads = kernel.backward(dout, q, k, v, lse, delta, table, softmax_scale, grad_dtype=q.dtype)
        return *grads, None, None, None, None
