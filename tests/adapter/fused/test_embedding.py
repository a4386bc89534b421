"""The embedding's gradient by rows, against the dense one."""

import pytest
import torch

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused.embedding import add_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("tokens", [1, 2, 37, 500])
@pytest.mark.parametrize("words", [1, 5, 4000])
def test_rows_are_added_to_what_is_there(tokens, words):
    torch.manual_seed(tokens + words)
    ids = torch.randint(0, words, (tokens,), device=DEVICE)
    grad = torch.randn(tokens, 8, device=DEVICE)
    main_grad = torch.randn(words, 8, device=DEVICE)
    before = main_grad.double()
    want = before.index_add(0, ids, grad.double())
    again = main_grad.clone()
    add_rows(main_grad, ids, grad)
    add_rows(again, ids, grad)
    torch.testing.assert_close(main_grad.double(), want, rtol=1e-5, atol=1e-4)
    assert torch.equal(main_grad, again)
    untouched = torch.ones(words, dtype=torch.bool, device=DEVICE)
    untouched[ids] = False
    assert torch.equal(main_grad[untouched], before.float()[untouched])


def test_16_bit_gradients_are_summed_in_fp32():
    """Of 4,096 equal ones a bf16 sum would stop at 256."""
    main_grad = torch.zeros(3, 2, device=DEVICE)
    ids = torch.full((4096,), 2, device=DEVICE)
    add_rows(main_grad, ids, torch.ones(4096, 2, dtype=torch.bfloat16, device=DEVICE))
    assert main_grad.tolist() == [[0, 0], [0, 0], [4096, 4096]]
