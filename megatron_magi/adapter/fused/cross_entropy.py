"""Vocabulary-parallel cross entropy that reads 16-bit logits once and turns them into gradients.

Megatron's plain path creates an fp32 copy of the logits and keeps fp32 probabilities: 8 bytes per
logit besides the 2 that the projection wrote. Here the forward kernel keeps one number per row, and
the backward kernel overwrites the logits with their gradient. Existing libraries do not fit:
liger-kernel's function returns losses in the logits' precision, and the host waits for the device
to learn whether the incoming gradient is 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_magi.core.kernel.autograd import differentiable_once

BLOCK = 4096
"""Logits that a program holds at once."""


def cross_entropy(logits: Tensor, labels: Tensor, tp_group: Any = None) -> Tensor:
    """-log softmax(logits)[label] of every row. The logits are overwritten by the backward pass.

    Args:
        logits: [..., vocabulary of this tensor-parallel rank], contiguous, any float dtype.
        labels: int64 [...], ids of the whole vocabulary.
        tp_group: ranks that hold the other parts of the vocabulary, in its order. None: one rank
            holds all of it. A group costs two all-reduces, of 4 and 8 bytes per row.

    Returns:
        float32 [...], nats.

    Raises:
        RuntimeError: from a second backward pass through the same logits.
    """
    if tp_group is not None and dist.get_world_size(tp_group) == 1:
        tp_group = None
    losses: Tensor = _CrossEntropy.apply(logits, labels, tp_group)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp_group: Any) -> Tensor:
        first = 0 if tp_group is None else dist.get_rank(tp_group) * logits.shape[-1]
        rows, own_labels = logits.flatten(0, -2), labels.flatten() - first
        lse, picked = _row_sums(rows, own_labels)
        if tp_group is not None:
            lse, picked = _over_ranks(lse, picked, tp_group)
        ctx.save_for_backward(rows, own_labels, lse)
        ctx.is_spent = False
        return (lse - picked).view(labels.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.is_spent:
            raise RuntimeError(
                "the fused cross entropy takes one backward pass, got a second one, and its logits "
                "are overwritten; run the forward pass again, or set model.fused=off"
            )
        ctx.is_spent = True
        rows, own_labels, lse = ctx.saved_tensors
        (grad,) = grads
        _logits_gradient[(rows.shape[0],)](
            rows, own_labels, lse, grad.float().contiguous(), rows.shape[1], BLOCK, num_warps=16
        )
        return rows.view(*grad.shape, rows.shape[1]), None, None


def _row_sums(rows: Tensor, own_labels: Tensor) -> tuple[Tensor, Tensor]:
    """float32: the log of the sum of exponentials, and the label's logit or 0 if another rank has
    it."""
    lse = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    picked = torch.empty_like(lse)
    _row_statistics[(rows.shape[0],)](
        rows, own_labels, lse, picked, rows.shape[1], BLOCK, num_warps=16
    )
    return lse, picked


def _over_ranks(lse: Tensor, picked: Tensor, tp_group: Any) -> tuple[Tensor, Tensor]:
    """lse and picked for the whole vocabulary: exp(lse) and picked add up over its parts."""
    highest = lse.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp_group)
    sums = torch.stack([torch.exp(lse - highest), picked])
    dist.all_reduce(sums, group=tp_group)
    return highest + sums[0].log(), sums[1]


@triton.jit  # type: ignore[untyped-decorator]
def _row_statistics(  # type: ignore[no-untyped-def]
    logits, own_labels, lse, picked, width, block: tl.constexpr
):
    """Each program computes one row: maximum and sum of exponentials, first per thread.

    So threads synchronise once per row, not once per block. A thread loads eight columns at once.
    """
    row = tl.program_id(0).to(tl.int64)
    own = tl.arange(0, block // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    highest = tl.full([block // 8], float("-inf"), dtype=tl.float32)
    total = tl.zeros([block // 8], dtype=tl.float32)
    for start in range(0, width, block):
        column = start + own
        x = tl.load(logits + row * width + column, mask=column < width, other=float("-inf"))
        x = x.to(tl.float32)
        raised = tl.maximum(highest, tl.max(x, axis=1))
        shift = tl.where(raised == float("-inf"), 0.0, raised)  # -inf until a logit is finite
        total = total * tl.exp(highest - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
        highest = raised
    top = tl.max(highest, axis=0)
    total = tl.sum(total * tl.exp(highest - top), axis=0)
    label = tl.load(own_labels + row)
    is_own = (label >= 0) & (label < width)
    x = tl.load(logits + row * width + label, mask=is_own, other=0.0).to(tl.float32)
    tl.store(lse + row, top + tl.log(total))
    tl.store(picked + row, x)


@triton.jit  # type: ignore[untyped-decorator]
def _logits_gradient(  # type: ignore[no-untyped-def]
    logits, own_labels, lse, grad, width, block: tl.constexpr
):
    """Each program computes one row: logits become (softmax - 1 at the label) * grad of the row."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(own_labels + row)
    shift = tl.load(lse + row)
    scale = tl.load(grad + row)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        at = logits + row * width + column
        x = tl.load(at, mask=column < width, other=float("-inf")).to(tl.float32)
        p = tl.exp(x - shift) - tl.where(column == label, 1.0, 0.0)
        tl.store(at, p * scale, mask=column < width)


class FusedLossGPTModel(GPTModel):  # type: ignore[misc]
    """GPTModel with the same parameters. The backward pass overwrites the logits, so each forward
    pass allows one backward pass."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Megatron's: labels [batch, rows], logits [rows, batch, vocabulary of this rank].

        Returns:
            float32 [batch, rows], nats.
        """
        losses = cross_entropy(
            logits.contiguous(), labels.transpose(0, 1).contiguous(), self.pg_collection.tp
        )
        return losses.transpose(0, 1).contiguous()
