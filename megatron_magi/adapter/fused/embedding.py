"""The embedding's gradient added to the gradient buffer row by row, where tokens read it.

Megatron makes a matrix of the whole vocabulary for it, zeroes it, adds it to the output layer's
when both are one weight, and adds all of it to the fp32 buffer: of 128,256 words that is five
gigabytes of memory traffic for the rows of a few thousand tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor


class RowGradientEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """Megatron's embedding on one tensor-parallel rank; its weight has a ``main_grad``."""

    has_other_gradient = False
    """The output layer of the same weight tells the wrapper that the gradient is complete."""

    def forward(self, input_: Tensor) -> Tensor:
        """[batch, rows] of words -> [batch, rows, hidden]."""
        if not torch.is_grad_enabled():
            out: Tensor = super().forward(input_)
            return out
        out = _Rows.apply(input_, self.weight, self.has_other_gradient)
        return out


def take_rows(model: Any) -> None:
    """Let a GPTModel's embedding add its gradient by rows; before the model is wrapped.

    Nothing happens where the rows are spread over tensor-parallel ranks, or on a pipeline stage
    without an embedding.
    """
    words: Any = getattr(getattr(model, "embedding", None), "word_embeddings", None)
    if type(words) is not VocabParallelEmbedding or words.tp_group.size() > 1:
        return
    words.__class__ = RowGradientEmbedding  # Megatron's embedding names its class itself
    words.has_other_gradient = model.share_embeddings_and_output_weights and model.post_process
    # Megatron zeroes what the output layer gives for a shared weight and adds it to the buffer.
    # Nothing else gives a gradient now, so that is left out like any other layer's.
    words.weight.zero_out_wgrad = False


def add_rows(main_grad: Tensor, words: Tensor, grad: Tensor) -> None:
    """main_grad[word] += the sum of its tokens' gradients; two runs give equal bits.

    Args:
        main_grad: [vocabulary, hidden], changed in place.
        words: int64 [tokens].
        grad: [tokens, hidden].

    Every word gets a number below the number of tokens, so that the sums need no matrix of the
    vocabulary and each word one addition. Numbers that are left over add zeros to word 0.
    """
    ordered, order = words.sort(stable=True)
    is_new = torch.ones_like(ordered)
    is_new[1:] = ordered[1:] != ordered[:-1]
    number = is_new.cumsum(0) - 1
    of_token = torch.empty_like(number).scatter_(0, order, number)
    sums = torch.ops.aten.embedding_dense_backward(
        grad.to(main_grad.dtype), of_token, len(words), -1, False
    )
    word_of = torch.zeros_like(number).scatter_(0, number, ordered)
    main_grad.index_add_(0, word_of, sums)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: Tensor, weight: Tensor, has_other_gradient: bool) -> Tensor:
        ctx.save_for_backward(words)
        ctx.weight, ctx.has_other_gradient = weight, has_other_gradient
        return torch.nn.functional.embedding(words, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None]:
        (words,) = ctx.saved_tensors
        (grad,) = grads
        weight = ctx.weight
        add_rows(weight.main_grad, words.flatten(), grad.flatten(0, -2))
        weight.grad_added_to_main_grad = True
        # The wrapper waits for a gradient of every weight; its values do not count.
        return None, None if ctx.has_other_gradient else torch.empty_like(weight), None
