"""The parts beside attention by our kernels and by Megatron without fused kernels.

Each function makes a call that computes a part once, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks.lib.cell import Call
from benchmarks.train.part_cases import Sizes, Tensors, both_ways, split

Make = Callable[[Sizes, Tensors], Call]


def rope_call(function: Callable[[Tensor], Any], x: Tensors) -> Call:
    """A function of the projection, which gives q, k and v contiguous, as our attention makes
    them."""
    grads = [x["dq"], x["dk"], x["dv"]]

    def contiguous(mixed: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.contiguous() for t in function(mixed))

    return lambda: both_ways(contiguous, [x["mixed"]], grads)


def our_rope(sizes: Sizes, x: Tensors) -> Call:
    """`split_and_rotate`."""
    from megatron_magi.adapter.fused.qkv_rope import split_and_rotate

    return rope_call(lambda m: split_and_rotate(m, x["angles"], sizes.groups, sizes.head_dim), x)


def megatron_rope(sizes: Sizes, x: Tensors) -> Call:
    """Megatron without apply_rope_fusion."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    def function(mixed: Tensor) -> Any:
        q, k, v = split(sizes, mixed)
        q, k = (
            _apply_rotary_pos_emb_bshd(t, x["angles"], rotary_interleaved=False) for t in (q, k)
        )
        return q, k, v

    return rope_call(function, x)


def loss_call(function: Callable[[Tensor], Tensor], x: Tensors) -> Call:
    """A function of the logits, which may overwrite them: then a call reads the gradients that the
    one before it left. The time of none depends on the values."""
    return lambda: both_ways(function, [x["logits"]], [x["dloss"]])


def our_loss(sizes: Sizes, x: Tensors) -> Call:
    """`cross_entropy`, which overwrites the logits."""
    from megatron_magi.adapter.fused.cross_entropy import cross_entropy

    return loss_call(lambda logits: cross_entropy(logits, x["labels"]), x)


OURS = "ours"
IMPLS: dict[str, dict[str, Make]] = {
    "qkv_rope": {OURS: our_rope, "megatron": megatron_rope},
    "cross_entropy": {OURS: our_loss},
}
