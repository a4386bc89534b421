"""FlashAttention-4 (the package flash-attn-4) behind the AttnBackend protocol, for GPUs without
kernels of magi's own, above all Blackwell.

``flash4_mask`` says which cells are visible. A table with many slices a row is computed in the
parts that ``slice_parts`` makes. Shapes: T query tokens, S key tokens, H query heads, G key/value
heads, D head_dim of queries and keys, E of values.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from megatron_magi.core.kernel.backend import AttnCall, GradCall, Gradients, OutLse
from megatron_magi.core.kernel.flash4_mask import flash4_mask
from megatron_magi.core.kernel.flex_block_mask import clear_empty_rows
from megatron_magi.core.kernel.head_dims import HeadDims, widths_of
from megatron_magi.core.kernel.key_splitting import InParts
from megatron_magi.core.kernel.split_slices import Part
from megatron_magi.core.kernel.torch_flex import FlexBackend

DTYPES = (torch.bfloat16, torch.float16)
MOST_WIDTH = 128
"""Wider heads get other block sizes in the backward than in the forward, and one list of blocks
serves both."""
WIDTHS_STEP = 8
"""Head dims are multiples of it."""
MODULE = "flash_attn.cute"
CAPABILITIES = (9, 10)
"""Major compute capabilities on which FlashAttention-4 skips blocks, forward and backward."""


def is_installed() -> bool:
    """True if the package is there; older packages of the name flash_attn lack the module."""
    try:
        return importlib.util.find_spec(MODULE) is not None
    except ModuleNotFoundError:  # no flash_attn at all
        return False


def why_not(widths: HeadDims, dtype: torch.dtype) -> str | None:
    """Why no call with such heads can run, and what to do; None: it can."""
    fits = max(widths) <= MOST_WIDTH and not any(width % WIDTHS_STEP for width in widths)
    if fits and dtype in DTYPES:
        return None
    return (
        f"the kernel 'fa4' takes bf16 and fp16, and heads of multiples of {WIDTHS_STEP} up to "
        f"{MOST_WIDTH}, got {dtype} and widths {tuple(widths)}; use 'flex'"
    )


class Flash4Backend(InParts):
    """Forward and backward by FlashAttention-4. A part's backward needs the final lse and delta
    alone, so nothing is computed again."""

    name = "fa4"

    def check(self, call: AttnCall) -> None:
        super().check(call)
        if reason := why_not(widths_of(call.q, call.v), call.q.dtype):
            raise NotImplementedError(reason)

    def attend(self, part: Part) -> OutLse:
        from flash_attn.cute.interface import _flash_attn_fwd

        call = part.call
        if _sees_nothing(call):
            out = call.q.new_zeros((*call.q.shape[:2], call.v.shape[2]))
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
        return clear_empty_rows(out[0], lse[0].T, call.table)

    def part_gradients(self, part: Part, grad: GradCall) -> tuple[Tensor, ...]:
        """(dq, dk, dv) in the dtype of q; ``grad`` has delta.

        FlashAttention-4 subtracts the row sum of out * dout minus the gradient of lse from the
        gradient of each probability. It gets 0 for out and minus delta for the gradient of lse, and
        so subtracts delta.
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

    def backward(self, call: AttnCall, grad: GradCall) -> Gradients:
        """See AttnBackend; it raises the same errors as ``forward``. FlexAttention, which adds in
        a fixed order, computes deterministic gradients."""
        self.check(call)
        if grad.deterministic:
            return FlexBackend().backward(call, grad)
        return super().backward(call, grad)


def _numbers(call: AttnCall) -> dict[str, Any]:
    return {"softmax_scale": call.softmax_scale, "softcap": call.softcap}


def _sees_nothing(call: AttnCall) -> bool:
    return len(call.table.slices) == 0 or 0 in call.q.shape or 0 in call.k.shape
