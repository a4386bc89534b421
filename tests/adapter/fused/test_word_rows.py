"""The embedding's gradient by one kernel, against sums in fp64. Interpreted on the CPU."""

import pytest
import torch

from tests.adapter.interpreter import DEVICE  # isort: skip

from megatron_magi.adapter.fused import word_rows
from megatron_magi.adapter.fused.word_rows import add_word_rows


@pytest.mark.parametrize("tokens", [1, 2, 37, 90])
@pytest.mark.parametrize("words", [1, 5, 4000])
@pytest.mark.parametrize("tile", [(2, 16), (8, 512)])
def test_rows_are_added_to_what_is_there(tokens, words, tile, monkeypatch):
    monkeypatch.setattr(word_rows, "TILE", tile)
    torch.manual_seed(tokens + words)
    ids = torch.randint(0, words, (tokens,), device=DEVICE)
    grad = torch.randn(tokens, 40, device=DEVICE)
    main_grad = torch.randn(words, 40, device=DEVICE)
    before = main_grad.double()
    want = before.index_add(0, ids, grad.double())
    again = main_grad.clone()
    add_word_rows(main_grad, ids, grad)
    add_word_rows(again, ids, grad)
    torch.testing.assert_close(main_grad.double(), want, rtol=1e-5, atol=1e-4)
    assert torch.equal(main_grad, again)
    untouched = torch.ones(words, dtype=torch.bool, device=DEVICE)
    untouched[ids] = False
    assert torch.equal(main_grad[untouched], before.float()[untouched])


def test_16_bit_gradients_are_summed_in_fp32():
    """Of 600 equal ones a bf16 sum would stop at 256."""
    main_grad = torch.zeros(3, 2, device=DEVICE)
    ids = torch.full((600,), 2, device=DEVICE)
    add_word_rows(main_grad, ids, torch.ones(600, 2, dtype=torch.bfloat16, device=DEVICE))
    assert main_grad.tolist() == [[0, 0], [0, 0], [600, 600]]
