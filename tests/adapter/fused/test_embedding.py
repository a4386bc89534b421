"""The embedding's gradient by rows, against the dense one."""

import pytest
import torch

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused.embedding import add_rows
from tests.adapter.fused.added_rows import check_16_bit_gradients, check_rows_are_added

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("tokens", [1, 2, 37, 500])
@pytest.mark.parametrize("words", [1, 5, 4000])
def test_rows_are_added_to_what_is_there(tokens, words):
    check_rows_are_added(add_rows, tokens, words, DEVICE)


def test_16_bit_gradients_are_summed_in_fp32():
    check_16_bit_gradients(add_rows, 4096, DEVICE)
