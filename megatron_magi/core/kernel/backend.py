"""What a kernel backend is: the calls that it is given, and what it gives back.

T query tokens, S key tokens, H query heads, G key/value heads, D head_dim of queries and keys, E of
values (another one in multi-latent attention).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_magi.core.kernel.slice_table import SliceTable

OutLse = tuple[Tensor, Tensor]
Pair = tuple[Tensor, Tensor]


class AttnCall(NamedTuple):
    """What attention is asked for: queries, keys and values, and who sees whom."""

    q: Tensor
    """[T, H, D], any strides with the last dimension contiguous."""
    k: Tensor
    """[S, G, D], likewise; H is a multiple of G."""
    v: Tensor
    """[S, G, E], likewise. Not every backend takes E other than D."""
    table: SliceTable
    softmax_scale: float


class GradCall(NamedTuple):
    """What a backward is asked for beside its AttnCall."""

    dout: Tensor
    """[T, H, E]"""
    lse: Tensor
    """[T, H], the final one over all stages."""
    delta: Tensor | None = None
    """[T, H], the row sum of out * dout, so that partial gradients of several stages add up."""
    out: Tensor | None = None
    """[T, H, E], the final one, instead of delta."""
    dtype: torch.dtype | None = None
    """Of the gradients: that of q, or the accumulation dtype (None)."""
    dq: Tensor | None = None
    """In the accumulation dtype: the gradient is added to it in place, and it is returned."""
    dkv: Pair | None = None
    """Where dk and dv are written, any strides with the last dimension contiguous."""
    deterministic: bool = False
    """Equal bits from run to run."""


class AttnBackend(Protocol):
    """Attention over the slices of a table.

    The accumulation dtype is fp32, fp64 for fp64 inputs. lse is the natural log of the sum of exp
    of scaled scores; -inf with out = 0 where a row sees nothing.
    """

    name: str

    def forward(
        self,
        call: AttnCall,
        *,
        prev: OutLse | None = None,
        into: OutLse | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> OutLse:
        """(out [T, H, E], lse [T, H]).

        Args:
            prev: both in the accumulation dtype: merged into it in place, and returned.
            into: rows that slices cover are written there, the others stay, and it is returned.
            out_dtype: of out otherwise; None: the dtype of q.
        """
        ...

    def backward(self, call: AttnCall, grad: GradCall) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv).

        Raises:
            ValueError: both or none of delta and out.
        """
        ...

    def delta(self, out: Tensor, dout: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, H] in ``dtype``: the row sum over E of out * dout."""
        ...


def row_delta(out_THE: Tensor, dout_THE: Tensor, dtype: torch.dtype) -> Tensor:
    """``AttnBackend.delta`` in PyTorch."""
    return (out_THE.to(dtype) * dout_THE.to(dtype)).sum(-1)


def less_dlse(delta_TH: Tensor, dlse_TH: Tensor | None) -> Tensor:
    """delta with the gradient of lse in it: d lse / d score is the softmax weight itself, so that
    gradient only moves what every score gradient of a row subtracts."""
    return delta_TH if dlse_TH is None else delta_TH - dlse_TH


def final_delta(grad: GradCall, dtype: torch.dtype) -> Tensor:
    """delta, or made from out where that was given instead.

    Raises:
        ValueError: both or none of them.
    """
    if (grad.delta is None) == (grad.out is None):
        raise ValueError("either delta or out is required, got none or both; pass one of them")
    if grad.delta is not None:
        return grad.delta
    assert grad.out is not None
    return row_delta(grad.out, grad.dout, dtype)


def put_rows(rows: OutLse, table: SliceTable, into: OutLse) -> OutLse:
    """The rows that slices cover, put where they belong; see AttnBackend.forward."""
    for start, end in table.covered_rows.tolist():
        for target, made in zip(into, rows, strict=True):
            target[start:end] = made[start:end]
    return into


def deliver(grads: Pair, dkv: Pair | None) -> Pair:
    """Gradients of keys and values where the caller wants them; see GradCall.dkv."""
    if dkv is None:
        return grads
    for target, grad in zip(dkv, grads, strict=True):
        target.copy_(grad)
    return dkv


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_one_width(q: Tensor, v: Tensor) -> bool:
    """Whether values are as wide as queries and keys; in multi-latent attention they are not."""
    return q.shape[-1] == v.shape[-1]
