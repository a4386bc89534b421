"""The sums of `embedding.add_rows` in one kernel, which reads each token's gradient once.

torch's operations take an fp32 copy of the gradients, a matrix of sums, and a dozen kernels that
number the words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = (8, 512)
"""Rows and columns of the gradient that a program adds at a time."""


def add_word_rows(main_grad: Tensor, words: Tensor, grad: Tensor) -> None:
    """main_grad[word] += the sum of its tokens' gradients; two runs give equal bits.

    Args:
        main_grad: [vocabulary, hidden], contiguous, changed in place.
        words: integers [tokens], below 2^31.
        grad: [tokens, hidden], any float dtype; summed in fp32.
    """
    tokens, width = grad.shape
    ordered, order = words.to(torch.int32).sort(stable=True)  # half the passes of int64
    rows, block = TILE
    _add_runs[(tokens, triton.cdiv(width, block))](
        grad.contiguous(), ordered, order, main_grad, tokens, width, rows, block, num_warps=2
    )


@triton.jit  # type: ignore[untyped-decorator]
def _add_runs(  # type: ignore[no-untyped-def]
    grad, ordered, order, main_grad, tokens, width, rows: tl.constexpr, block: tl.constexpr
):
    """Each program adds some columns of one word: that of a token that is the first with it.

    The numbers of the next tokens are loaded before the gradients of these are added.
    """
    first = tl.program_id(0)
    word = tl.load(ordered + first)
    if word != tl.load(ordered + first - 1, mask=first > 0, other=-1):
        column = tl.program_id(1) * block + tl.arange(0, block)
        inside = column < width
        total = tl.zeros([rows, block], dtype=tl.float32)
        token = first + tl.arange(0, rows)
        is_own = tl.load(ordered + token, mask=token < tokens, other=-1) == word
        row = tl.load(order + token, mask=token < tokens, other=0)
        begin = first
        has_more = True
        while has_more:
            at = row.to(tl.int64)[:, None] * width + column[None, :]
            values = tl.load(grad + at, mask=is_own[:, None] & inside[None, :], other=0.0)
            begin += rows
            token += rows
            has_more = tl.load(ordered + begin, mask=begin < tokens, other=-1) == word
            is_own = tl.load(ordered + token, mask=token < tokens, other=-1) == word
            row = tl.load(order + token, mask=token < tokens, other=0)
            total += values.to(tl.float32)
        at = main_grad + word.to(tl.int64) * width + column
        result = tl.load(at, mask=inside, other=0.0).to(tl.float32) + tl.sum(total, axis=0)
        tl.store(at, result, mask=inside)
