"""What every way to add an embedding's gradient must do: (main_grad, ids, grad) -> None."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Add = Callable[[Tensor, Tensor, Tensor], None]


def check_rows_are_added(add: Add, tokens: int, words: int, device: str) -> None:
    """To what is there, like sums in fp64, with equal bits again; other rows are left alone."""
    torch.manual_seed(tokens + words)
    ids = torch.randint(0, words, (tokens,), device=device)
    grad = torch.randn(tokens, 40, device=device)
    main_grad = torch.randn(words, 40, device=device)
    before = main_grad.double()
    again = main_grad.clone()
    add(main_grad, ids, grad)
    add(again, ids, grad)
    want = before.index_add(0, ids, grad.double())
    torch.testing.assert_close(main_grad.double(), want, rtol=1e-5, atol=1e-4)
    assert torch.equal(main_grad, again)
    untouched = torch.ones(words, dtype=torch.bool, device=device)
    untouched[ids] = False
    assert torch.equal(main_grad[untouched], before.float()[untouched])


def check_16_bit_gradients(add: Add, tokens: int, device: str) -> None:
    """Of more than 256 equal ones, which is where a bf16 sum would stop."""
    main_grad = torch.zeros(3, 2, device=device)
    ids = torch.full((tokens,), 2, device=device)
    add(main_grad, ids, torch.ones(tokens, 2, dtype=torch.bfloat16, device=device))
    assert main_grad.tolist() == [[0, 0], [0, 0], [tokens, tokens]]
