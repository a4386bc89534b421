"""The protocol of a kernel backend: the calls that it takes, and what it returns.

T query tokens, S key tokens, H query heads, G key/value heads, D head_dim of queries and keys, E of
values (another one in multi-latent attention).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_magi.core.kernel.slice_table import SliceTable

OutLse = tuple[Tensor, Tensor]
Pair = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]
"""dq [T, H, D], dk [S, G, D], dv [S, G, E]."""


class AttnCall(NamedTuple):
    """The inputs of one attention call: queries, keys, values, and which query sees which key."""

    q: Tensor
    """[T, H, D], any strides with the last dimension contiguous."""
    k: Tensor
    """[S, G, D], any strides with the last dimension contiguous; H is a multiple of G."""
    v: Tensor
    """[S, G, E], any strides with the last dimension contiguous."""
    table: SliceTable
    softmax_scale: float
    max_logits: Tensor | None = None
    """[H] in the accumulation dtype: a forward raises it in place to each head's largest visible
    logit. Not every backend can."""
    softcap: float = 0.0
    """0: logits are scaled scores. Otherwise they are softcap * tanh(scaled score / softcap)."""
    sink_lse: Tensor | None = None
    """[H] or [T, H] in the accumulation dtype: a logit without a value that joins the softmax of
    every row that the call writes, also of rows that see nothing. If the results of several calls
    are merged, only the first call has it, so ``prev`` must be None. A backward ignores it."""


PreparedForward = Callable[[AttnCall], OutLse]
"""A forward of calls whose key and table are known."""


class GradCall(NamedTuple):
    """The inputs of a backward besides its AttnCall."""

    dout: Tensor
    """[T, H, E]"""
    lse: Tensor
    """[T, H], the final one over all stages."""
    delta: Tensor | None = None
    """[T, H], the row sum of out * dout, so that partial gradients of several stages add up."""
    out: Tensor | None = None
    """[T, H, E], the final one, given instead of delta."""
    dtype: torch.dtype | None = None
    """The dtype of the gradients: that of q, or the accumulation dtype (None)."""
    dq: Tensor | None = None
    """A tensor in the accumulation dtype: the gradient is added in place, and it is returned."""
    dkv: Pair | None = None
    """Where dk and dv are written, any strides with the last dimension contiguous."""
    deterministic: bool = False
    """True if gradients must have equal bits from run to run."""


class AttnBackend(Protocol):
    """Attention over the slices of a table.

    The accumulation dtype is fp32, or fp64 for fp64 inputs. lse is the natural log of the sum of
    exp of logits. Where a row sees nothing, lse is -inf and out is 0.
    """

    name: str
    adds_atomically: bool
    """True if two backward calls on different streams may add to one dq at the same time."""
    finds_max_logits: bool
    """True if the forward takes AttnCall.max_logits."""

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
            prev: an (out, lse) in the accumulation dtype: the result is merged into it in place,
                and it is returned.
            into: an (out, lse) in which the rows that slices cover are written; it is returned.
            out_dtype: of a new out; None: the dtype of q.
        """
        ...

    def prepared_forward(self, call: AttnCall, out_dtype: torch.dtype) -> PreparedForward:
        """``forward`` without ``prev`` and ``into`` for calls of this one's key on its table,
        which it computes without looking at their key. It must not refer to the table, because it
        is kept in ``SliceTable.calls``."""
        ...

    def backward(self, call: AttnCall, grad: GradCall) -> Gradients:
        """(dq, dk, dv).

        Raises:
            ValueError: both or neither of delta and out are given.
        """
        ...

    def delta(self, out: Tensor, dout: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, H] in ``dtype``: the row sum over E of out * dout."""
        ...


class StatelessBackend:
    """A backend that computes every call as if it were the first of its key."""

    forward: Callable[..., OutLse]

    def prepared_forward(self, call: AttnCall, out_dtype: torch.dtype) -> PreparedForward:
        return partial(self.forward, out_dtype=out_dtype)


def row_delta(out_THE: Tensor, dout_THE: Tensor, dtype: torch.dtype) -> Tensor:
    """``AttnBackend.delta`` in PyTorch."""
    return (out_THE.to(dtype) * dout_THE.to(dtype)).sum(-1)


def subtract_dlse(delta_TH: Tensor, dlse_TH: Tensor | None) -> Tensor:
    """delta minus the gradient of lse. As d lse / d score is the softmax weight itself, that
    gradient only changes the delta that every score gradient of a row subtracts."""
    return delta_TH if dlse_TH is None else delta_TH - dlse_TH


def final_delta(grad: GradCall, dtype: torch.dtype) -> Tensor:
    """delta as given, or computed from out if that was given instead.

    Raises:
        ValueError: both or neither of them are given.
    """
    if (grad.delta is None) == (grad.out is None):
        raise ValueError("either delta or out is required, got none or both; pass one of them")
    if grad.delta is not None:
        return grad.delta
    assert grad.out is not None
    return row_delta(grad.out, grad.dout, dtype)


def scatter_rows_(rows: OutLse, table: SliceTable, into: OutLse) -> OutLse:
    """Copy the rows that slices cover into ``into``; see AttnBackend.forward."""
    for start, end in table.covered_rows.tolist():
        for target, made in zip(into, rows, strict=True):
            target[start:end] = made[start:end]
    return into


def copy_grads_(grads: Pair, dkv: Pair | None) -> Pair:
    """Copy gradients of keys and values to where the caller wants them; see GradCall.dkv."""
    if dkv is None:
        return grads
    for target, grad in zip(dkv, grads, strict=True):
        target.copy_(grad)
    return dkv


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32
