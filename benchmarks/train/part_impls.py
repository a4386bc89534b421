"""The parts beside attention by our kernels, by torch and by Megatron without fused kernels.

Each function makes a call that computes a part once, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm

from benchmarks.lib.cell import Call
from benchmarks.train.part_cases import EPS, Sizes, Tensors, both_ways, split

Make = Callable[[Sizes, Tensors], Call]


def norm_call(function: Callable[..., Any], weight: Tensor, x: Tensors) -> Call:
    """A function of both addends, which gives their sum and its norm. The weight's gradient is
    added to main_grad by another kernel, as Megatron's wrapper does it."""

    def call() -> tuple[Tensor, ...]:
        inputs, grads = [x["x"], x["residual"]], [x["dtotal"], x["dout"]]
        *found, dweight = both_ways(function, inputs, grads, (weight,))
        x["main_grad"].add_(dweight)
        return (*found, x["main_grad"])

    return call


def our_norm(sizes: Sizes, x: Tensors) -> Call:
    """The kernel below `residual.add_and_normalize`, which adds to main_grad itself."""
    from megatron_magi.adapter.fused.norm import AddAndNormalize

    weight: Any = torch.nn.Parameter(x["weight"])
    weight.main_grad, weight.grad_added_to_main_grad = x["main_grad"], False

    def function(a: Tensor, b: Tensor) -> Any:
        return AddAndNormalize.apply(a, b, weight, EPS, True)

    def call() -> tuple[Tensor, ...]:
        inputs, grads = [x["x"], x["residual"]], [x["dtotal"], x["dout"]]
        return (*both_ways(function, inputs, grads), x["main_grad"])

    return call


def torch_norm(sizes: Sizes, x: Tensors) -> Call:
    """An addition and torch's norm; autograd adds the gradient that goes past the norm."""
    weight = torch.nn.Parameter(x["weight"])

    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        total = a + b
        return total, rms_norm(total, (sizes.hidden,), weight, EPS)

    return norm_call(function, weight, x)


def our_swiglu(sizes: Sizes, x: Tensors) -> Call:
    """`swiglu`."""
    from megatron_magi.adapter.fused.swiglu import swiglu

    return lambda: both_ways(swiglu, [x["mixed"]], [x["dout"]])


def megatron_swiglu(sizes: Sizes, x: Tensors) -> Call:
    """Megatron's bias_activation_fusion, which torch compiles."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    return lambda: both_ways(lambda m: bias_swiglu_impl(m, None), [x["mixed"]], [x["dout"]])


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


def by_rows(add: Callable[[Tensor, Tensor, Tensor], None], x: Tensors) -> Call:
    """A lookup, and the gradient added to main_grad in the rows that were read."""

    def call() -> tuple[Tensor, ...]:
        out = embedding(x["words"], x["weight"])
        add(x["main_grad"], x["words"].flatten(), x["dout"].flatten(0, 1))
        return out, x["main_grad"]

    return call


def our_embedding(sizes: Sizes, x: Tensors) -> Call:
    """`word_rows.add_word_rows`."""
    from megatron_magi.adapter.fused.word_rows import add_word_rows

    return by_rows(add_word_rows, x)


def embedding_without_triton(sizes: Sizes, x: Tensors) -> Call:
    """`embedding.add_rows`, which the trainer takes where Triton is absent."""
    from megatron_magi.adapter.fused.embedding import add_rows

    return by_rows(add_rows, x)


def torch_embedding(sizes: Sizes, x: Tensors) -> Call:
    """A 16-bit matrix of the whole vocabulary, which is then added to main_grad."""

    def call() -> tuple[Tensor, ...]:
        inputs, grads = [x["weight"]], [x["dout"]]
        out, dweight = both_ways(lambda weight: embedding(x["words"], weight), inputs, grads)
        return out, x["main_grad"].add_(dweight)

    return call


OURS = "ours"
IMPLS: dict[str, dict[str, Make]] = {
    "norm": {OURS: our_norm, "torch": torch_norm},
    "swiglu": {OURS: our_swiglu, "megatron": megatron_swiglu},
    "qkv_rope": {OURS: our_rope, "megatron": megatron_rope},
    "cross_entropy": {OURS: our_loss},
    "embedding": {
        OURS: our_embedding, "without_triton": embedding_without_triton, "torch": torch_embedding,
    },
}  # fmt: skip
