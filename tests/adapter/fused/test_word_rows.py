"""The embedding's gradient by one kernel, against sums in fp64. Interpreted on the CPU."""

import pytest

from tests.adapter.interpreter import DEVICE  # isort: skip

from megatron_magi.adapter.fused import word_rows
from megatron_magi.adapter.fused.word_rows import add_word_rows
from tests.adapter.fused.added_rows import check_16_bit_gradients, check_rows_are_added


@pytest.mark.parametrize("tokens", [1, 2, 37, 90])
@pytest.mark.parametrize("words", [1, 5, 4000])
@pytest.mark.parametrize("tile", [(2, 16), (8, 512)])
def test_rows_are_added_to_what_is_there(tokens, words, tile, monkeypatch):
    monkeypatch.setattr(word_rows, "TILE", tile)
    check_rows_are_added(add_word_rows, tokens, words, DEVICE)


def test_16_bit_gradients_are_summed_in_fp32():
    check_16_bit_gradients(add_word_rows, 600, DEVICE)
