"""Heads of widths without a kernel: padded with zeros to the least widths that have one.

Columns of zeros change no score; what they get in ``out`` and in the gradients is left out. Such a
call copies its inputs and results once, and the kernel computes the padded widths.

T query tokens, S key tokens, H query heads, G key/value heads, D head_dim, E width of values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_magi.core.kernel.backend import (
    AttnCall,
    GradCall,
    Gradients,
    OutLse,
    copy_grads_,
    scatter_rows_,
)
from megatron_magi.core.kernel.head_dims import HeadDims
from megatron_magi.core.kernel.merge import merge_


def padded_call(call: AttnCall, widths: HeadDims) -> AttnCall:
    """The call with heads as wide as ``widths``."""
    q, k = (_padded(x, widths.head_dim) for x in (call.q, call.k))
    return call._replace(q=q, k=k, v=_padded(call.v, widths.value_dim))


def padded_dtype(
    prev: OutLse | None, into: OutLse | None, out_dtype: torch.dtype | None
) -> torch.dtype | None:
    """The dtype of the padded output, so that nothing is rounded twice."""
    if prev is not None:
        return torch.float32
    return out_dtype if into is None else into[0].dtype


def deliver_output(
    padded: OutLse, call: AttnCall, prev: OutLse | None, into: OutLse | None
) -> OutLse:
    """The padded output, [T, H, >= E], where the caller of ``call`` wants it."""
    out, lse = padded[0][..., : call.v.shape[-1]], padded[1]
    if prev is not None:
        merge_(*prev, out, lse)
        return prev
    return (out.contiguous(), lse) if into is None else scatter_rows_((out, lse), call.table, into)


def padded_grad(grad: GradCall, wide: AttnCall) -> GradCall:
    """The inputs of the backward of a padded call."""
    dout, out = (None if x is None else _padded(x, wide.v.shape[-1]) for x in (grad.dout, grad.out))
    dq = None if grad.dq is None else torch.zeros_like(wide.q, dtype=grad.dq.dtype)
    assert dout is not None
    return grad._replace(dout=dout, out=out, dq=dq, dkv=None)


def deliver_gradients(padded: Gradients, call: AttnCall, grad: GradCall) -> Gradients:
    """The padded gradients where the caller of ``call`` wants them."""
    dq, dk, dv = (
        wide[..., : x.shape[-1]].contiguous() for wide, x in zip(padded, call[:3], strict=True)
    )
    dk, dv = copy_grads_((dk, dv), grad.dkv)
    return dq if grad.dq is None else grad.dq.add_(dq), dk, dv


def _padded(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
