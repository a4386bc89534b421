"""The parts beside attention by TransformerEngine and liger-kernel, which need not be there.

Each function imports what it needs and makes a call that computes a part once, forward and
backward. Where a library has several ways, the one that Megatron or the library's own adapter for
Megatron takes has the library's name alone, and the others are named by what is different.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.cell import Call
from benchmarks.train.part_cases import Sizes, Tensors, split
from benchmarks.train.part_impls import Make, loss_call, rope_call

NO_LABEL = -100


def te_rope(sizes: Sizes, x: Tensors) -> Call:
    """Megatron's apply_rope_fusion: one kernel for q and one for k."""
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    def function(mixed: Tensor) -> Any:
        q, k, v = split(sizes, mixed)
        kinds = {"tensor_format": "sbhd", "interleaved": False, "fused": True}
        q, k = (apply_rotary_pos_emb(t, x["angles"], **kinds) for t in (q, k))
        return q, k, v

    return rope_call(function, x)


def te_split_and_rope(sizes: Sizes, x: Tensors) -> Call:
    """Megatron's fused_single_qkv_rope, off by default: one kernel that also splits."""
    from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb

    widths = [sizes.heads // sizes.groups * sizes.head_dim, sizes.head_dim, sizes.head_dim]

    def function(mixed: Tensor) -> Any:
        grouped = mixed.view(sizes.tokens, 1, sizes.groups, sum(widths))
        found = apply_fused_qkv_rotary_pos_emb(grouped, x["angles"], x["angles"], widths)
        return (t.view(sizes.tokens, 1, -1, sizes.head_dim) for t in found)

    return rope_call(function, x)


def liger_rope(sizes: Sizes, x: Tensors) -> Call:
    """One kernel for q and k, in place on the copies that the split makes; it takes fp32 sines and
    cosines, made once, in which it computes. Memory is laid out as in Megatron, for a batch of one.
    """
    from liger_kernel.ops import LigerRopeFunction as Function

    cos, sin = (f(x["angles"]).view(1, sizes.tokens, -1) for f in (torch.cos, torch.sin))

    def function(mixed: Tensor) -> Any:
        q, k, v = split(sizes, mixed)
        q, k = Function.apply(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), cos, sin)
        return q.permute(2, 0, 1, 3), k.permute(2, 0, 1, 3), v

    return rope_call(function, x)


def te_loss(sizes: Sizes, x: Tensors) -> Call:
    """As Megatron calls it: the logits are copied and stay as they are."""
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    return loss_call(
        lambda logits: parallel_cross_entropy(logits, x["labels"], 0.0, False, None, NO_LABEL), x
    )


def te_overwriting_loss(sizes: Sizes, x: Tensors) -> Call:
    """Without the copy, which Megatron cannot ask for."""
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    return loss_call(
        lambda logits: parallel_cross_entropy(
            logits, x["labels"], 0.0, False, None, NO_LABEL, overwrite_input=True
        ),
        x,
    )


def liger_loss(sizes: Sizes, x: Tensors) -> Call:
    """The function of liger's adapter for Megatron, which keeps fp32 exponentials."""
    from liger_kernel.ops import LigerVocabParallelCEFunction as Function

    kinds = (None, NO_LABEL, 0.0, "megatron", "partition")
    return loss_call(lambda logits: Function.apply(logits, x["labels"], *kinds), x)


def liger_overwriting_loss(sizes: Sizes, x: Tensors) -> Call:
    """Liger's function for one GPU: its forward pass overwrites the logits with gradients, which
    another kernel multiplies by that of each loss."""
    from liger_kernel.ops import LigerCrossEntropyFunction as Function

    def function(logits: Tensor) -> Tensor:
        kinds = (None, NO_LABEL, 0.0, 0.0, "none")
        losses, *_ = Function.apply(logits.flatten(0, 1), x["labels"].flatten(), *kinds)
        return losses.float()[:, None]

    return loss_call(function, x)


RIVALS: dict[str, dict[str, Make]] = {
    "qkv_rope": {"te": te_rope, "te_split": te_split_and_rope, "liger": liger_rope},
    "cross_entropy": {
        "te": te_loss, "te_overwrites": te_overwriting_loss,
        "liger": liger_loss, "liger_overwrites": liger_overwriting_loss,
    },
}  # fmt: skip
