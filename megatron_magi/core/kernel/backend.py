"""The protocol of a kernel backend: the calls that it takes, and what it returns.

T query tokens, S key tokens, H query heads, G key/value heads, D head_dim of queries and keys, E of
values (another one in multi-latent attention).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_magi.core.kernel.slice_table import SliceTable

OutLse = tuple[Tensor, Tensor]
Pair = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]
"""dq [T, H, D], dk [S, G, D], dv [S, G, E]."""
RepeatedForward = Callable[[Tensor, Tensor, Tensor, Tensor | None], OutLse | None]
"""A forward whose form is known, as a function of q, k, v and ``AttnCall.max_logits``: shapes,
strides, dtypes and devices are those of an earlier call, and it checks none of them. None: it
computes nothing, because tensors lie where the kernels cannot read them."""
RepeatedBackward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Gradients | None]
"""A backward as a function of q, k, v, out, lse and dout. None: it computes nothing, because these
do not have the form of the earlier call, which it checks, or lie where the kernels cannot read
them."""


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
    """Whether gradients must have equal bits from run to run."""


class AttnBackend(Protocol):
    """Attention over the slices of a table.

    The accumulation dtype is fp32, or fp64 for fp64 inputs. lse is the natural log of the sum of
    exp of logits. Where a row sees nothing, lse is -inf and out is 0.
    """

    name: str
    adds_atomically: bool
    """Whether two backward calls on different streams may add to one dq at the same time."""

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

    def repeated_forward(self, call: AttnCall, out_dtype: torch.dtype) -> RepeatedForward | None:
        """A shorter way to compute further calls of the form of this one, which has been computed
        without ``prev`` and ``into``; None: there is none."""
        ...

    def repeated_backward(self, call: AttnCall, grad: GradCall) -> RepeatedBackward | None:
        """A shorter way to compute further backwards of the form of this one, which computed delta
        from ``out`` and made all its gradients. None: there is none."""
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


class NoRepeats:
    """What backends say that know no shorter way for repeated calls."""

    def repeated_forward(self, call: AttnCall, out_dtype: torch.dtype) -> RepeatedForward | None:
        return None

    def repeated_backward(self, call: AttnCall, grad: GradCall) -> RepeatedBackward | None:
        return None


def row_delta(out_THE: Tensor, dout_THE: Tensor, dtype: torch.dtype) -> Tensor:
    """``AttnBackend.delta`` in PyTorch."""
    return (out_THE.to(dtype) * dout_THE.to(dtype)).sum(-1)


def less_dlse(delta_TH: Tensor, dlse_TH: Tensor | None) -> Tensor:
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


def put_rows(rows: OutLse, table: SliceTable, into: OutLse) -> OutLse:
    """Copy the rows that slices cover into ``into``; see AttnBackend.forward."""
    for start, end in table.covered_rows.tolist():
        for target, made in zip(into, rows, strict=True):
            target[start:end] = made[start:end]
    return into


def deliver(grads: Pair, dkv: Pair | None) -> Pair:
    """Copy gradients of keys and values to where the caller wants them; see GradCall.dkv."""
    if dkv is None:
        return grads
    for target, grad in zip(dkv, grads, strict=True):
        target.copy_(grad)
    return dkv


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32
