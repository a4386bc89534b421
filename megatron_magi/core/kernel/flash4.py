"""FlashAttention-4 (the package flash-attn-4) behind the AttnBackend protocol, for GPUs without
kernels of our own, above all Blackwell.

``flash4_mask`` says which cells are visible. A table with many slices a row is computed in the
parts that ``flex_parts`` makes. Shapes: T query tokens, S key tokens, H query heads, G key/value
heads, D head_dim of queries and keys, E of values.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from megatron_magi.core.kernel.backend import (
    AttnCall,
    GradCall,
    OutLse,
    Unprepared,
    acc_dtype,
    deliver,
    final_delta,
    put_rows,
    row_delta,
)
from megatron_magi.core.kernel.flash4_mask import flash4_mask
from megatron_magi.core.kernel.flex_mask import empty_rows
from megatron_magi.core.kernel.flex_parts import Part, few_slices
from megatron_magi.core.kernel.merge import merge_
from megatron_magi.core.kernel.sink import check_joins, join_sink_
from megatron_magi.core.kernel.torch_flex import FlexBackend
from megatron_magi.core.kernel.widths import Widths, widths_of

DTYPES = (torch.bfloat16, torch.float16)
MOST_WIDTH = 128
"""The widest heads: the blocks of wider ones are not the same forward and backward."""
WIDTHS_STEP = 8
"""Widths of heads are multiples of it."""
MODULE = "flash_attn.cute"
CAPABILITIES = (9, 10)
"""Major compute capabilities on which FlashAttention-4 skips blocks, forward and backward."""


def is_installed() -> bool:
    """Whether the package is there; older packages of the name flash_attn lack the module."""
    try:
        return importlib.util.find_spec(MODULE) is not None
    except ModuleNotFoundError:  # no flash_attn at all
        return False


def why_not(widths: Widths, dtype: torch.dtype) -> str | None:
    """Why no call with such heads can run, and what to do; None: it can."""
    fits = max(widths) <= MOST_WIDTH and not any(width % WIDTHS_STEP for width in widths)
    if fits and dtype in DTYPES:
        return None
    return (
        f"the kernel 'fa4' takes bf16 and fp16, and heads of multiples of {WIDTHS_STEP} up to "
        f"{MOST_WIDTH}, got {dtype} and widths {tuple(widths)}; use 'flex'"
    )


class Flash4Backend(Unprepared):
    """Forward and backward by FlashAttention-4. A stage's backward needs the final lse and delta
    alone, so nothing is computed again."""

    name = "fa4"
    adds_atomically = False
    finds_max_logits = False
    delta = staticmethod(row_delta)

    def forward(
        self,
        call: AttnCall,
        *,
        prev: OutLse | None = None,
        into: OutLse | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> OutLse:
        """See AttnBackend.

        Raises:
            NotImplementedError: a dtype or widths of heads that the kernels do not take.
        """
        check_call(call)
        check_joins(call, prev)
        out, lse = join_sink_(*_forward(call), call)
        if into is not None:
            return put_rows((out.to(into[0].dtype), lse), call.table, into)
        if prev is None:
            return out.to(out_dtype or call.q.dtype), lse
        merge_(*prev, out, lse)
        return prev

    def backward(self, call: AttnCall, grad: GradCall) -> tuple[Tensor, Tensor, Tensor]:
        """See AttnBackend; it raises the same errors as ``forward``. FlexAttention, which adds in
        a fixed order, computes deterministic gradients."""
        check_call(call)
        if grad.deterministic:
            return FlexBackend().backward(call, grad)
        acc = acc_dtype(call.q.dtype)
        wanted = grad.dtype or acc
        grad = grad._replace(delta=final_delta(grad, acc), out=None)
        first, *others = few_slices(call)
        total = _part_gradients(first, grad)
        for part in others:
            more = _part_gradients(part, grad)
            total = tuple(x.to(acc).add_(y) for x, y in zip(total, more, strict=True))
        dq, dk, dv = (x.to(wanted) for x in total)
        return dq if grad.dq is None else grad.dq.add_(dq), *deliver((dk, dv), grad.dkv)


def check_call(call: AttnCall) -> None:
    """Check what FlashAttention-4 demands beyond attention.check_qkv."""
    if call.max_logits is not None:
        raise NotImplementedError(
            "the largest logits require the kernel 'cuda' (Hopper) or 'reference', got 'fa4', "
            "which does not keep them; bound the scores by the norms of q and k rows"
        )
    if reason := why_not(widths_of(call.q, call.v), call.q.dtype):
        raise NotImplementedError(reason)


def _forward(call: AttnCall) -> OutLse:
    """out [T, H, E] and lse [T, H] in fp32, the parts merged."""
    first, *others = few_slices(call)
    out, lse = _attend(first)
    for part in others:
        merge_(out, lse, *_attend(part))
    return out, lse


def _attend(part: Part) -> OutLse:
    from flash_attn.cute.interface import _flash_attn_fwd

    call = part.call
    if _sees_nothing(call):
        out = call.q.new_zeros((*call.q.shape[:2], call.v.shape[2]), dtype=torch.float32)
        return out, torch.full(call.q.shape[:2], -torch.inf, device=call.q.device)
    mask = flash4_mask(call.table, call.q.device, part.least_intervals)
    out, lse, *_ = _flash_attn_fwd(
        *(x[None] for x in call[:3]),
        **_numbers(call),
        mask_mod=mask.visible,
        aux_tensors=mask.intervals,
        block_sparse_tensors=mask.forward,
        pack_gqa=False,
        return_lse=True,
    )
    empty = empty_rows(call.table, call.q.device)[:, None]
    out, lse = out[0].float(), lse[0].T
    return out.masked_fill_(empty[:, None], 0.0), lse.masked_fill(empty, -torch.inf)


def _part_gradients(part: Part, grad: GradCall) -> tuple[Tensor, ...]:
    """(dq, dk, dv) in the dtype of q; ``grad`` has delta.

    The kernel subtracts the row sum of out * dout, less the gradient of lse. With an out of 0 that
    is whatever delta it is given as the negative gradient of lse.
    """
    from flash_attn.cute.interface import _flash_attn_bwd

    call = part.call
    if _sees_nothing(call):
        return tuple(torch.zeros_like(x) for x in call[:3])
    assert grad.delta is not None
    mask = flash4_mask(call.table, call.q.device, part.least_intervals)
    dout = grad.dout.to(call.q.dtype).contiguous()[None]
    lse = grad.lse.masked_fill(grad.lse.isneginf(), 0.0)
    gradients: tuple[Tensor, ...] = _flash_attn_bwd(
        *(x[None] for x in call[:3]),
        torch.zeros_like(dout),
        dout,
        lse.T.contiguous()[None],
        **_numbers(call),
        mask_mod=mask.visible,
        aux_tensors=mask.intervals,
        block_sparse_tensors=mask.backward,
        dlse=grad.delta.neg().T.contiguous()[None],
    )
    return tuple(x[0] for x in gradients[:3])


def _numbers(call: AttnCall) -> dict[str, Any]:
    return {"softmax_scale": call.softmax_scale, "softcap": call.softcap}


def _sees_nothing(call: AttnCall) -> bool:
    return len(call.table.slices) == 0 or 0 in call.q.shape or 0 in call.k.shape
