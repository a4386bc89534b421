"""The embedding's gradient, added to the gradient buffer only in the rows that tokens read.

Megatron allocates a matrix of the whole vocabulary for it, zeroes it, adds it to the output layer's
gradient if both share one weight, and adds all of it to the fp32 buffer. With 128,256 words that is
five gigabytes of memory traffic for the rows of a few thousand tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor

Add = Callable[[Tensor, Tensor, Tensor], None]


class RowGradientEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """Megatron's embedding on one tensor-parallel rank; its weight has a ``main_grad``."""

    add: Add
    has_other_gradient = False
    """Whether the output layer shares the weight and tells the wrapper that its gradient is
    complete."""

    def forward(self, input_: Tensor) -> Tensor:
        """[batch, rows] of words -> [batch, rows, hidden]."""
        if not torch.is_grad_enabled():
            out: Tensor = super().forward(input_)
            return out
        out = _Rows.apply(input_, self.weight, self.add, self.has_other_gradient)
        return out


def take_rows(model: Any, add: Add) -> None:
    """Let a GPTModel's embedding add its gradient by rows; call it before the model is wrapped.

    add is `add_rows`, or another function of its arguments.

    Nothing changes if the rows are split over tensor-parallel ranks, or on a pipeline stage without
    an embedding.
    """
    words: Any = getattr(getattr(model, "embedding", None), "word_embeddings", None)
    if type(words) is not VocabParallelEmbedding or words.tp_group.size() > 1:
        return
    # Megatron's model creates its embedding by class name, so the class is replaced afterwards.
    words.__class__ = RowGradientEmbedding
    words.add = add
    words.has_other_gradient = model.share_embeddings_and_output_weights and model.post_process
    # For a shared weight Megatron zeroes the gradient that the output layer returns and adds it to
    # the buffer. No other layer returns a gradient now, so this step is unnecessary.
    words.weight.zero_out_wgrad = False


def add_rows(main_grad: Tensor, words: Tensor, grad: Tensor) -> None:
    """main_grad[word] += the sum of its tokens' gradients; two runs give equal bits.

    Args:
        main_grad: [vocabulary, hidden], changed in place.
        words: int64 [tokens].
        grad: [tokens, hidden].

    Every word that occurs gets a number below the number of tokens, so that the sums need no matrix
    of the whole vocabulary, and each word is added once. Unused numbers add zeros to word 0.
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
    def forward(
        ctx: Any, words: Tensor, weight: Tensor, add: Add, has_other_gradient: bool
    ) -> Tensor:
        ctx.save_for_backward(words)
        ctx.weight, ctx.add, ctx.has_other_gradient = weight, add, has_other_gradient
        return torch.nn.functional.embedding(words, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (words,) = ctx.saved_tensors
        (grad,) = grads
        weight = ctx.weight
        ctx.add(weight.main_grad, words.flatten(), grad.flatten(0, -2))
        weight.grad_added_to_main_grad = True
        # The wrapper waits for a gradient of every weight, but does not read its values.
        return None, None if ctx.has_other_gradient else torch.empty_like(weight), None, None
