"""What follows from the shape of a model."""

from __future__ import annotations

import pytest

from megatron_magi.training.recipe.run_values import ModelConfig


def test_heads_share_the_hidden_size_unless_they_have_their_own() -> None:
    assert ModelConfig(hidden_size=96, num_attention_heads=4).kv_channels == 24
    assert ModelConfig(hidden_size=96, num_attention_heads=4, head_dim=64).kv_channels == 64


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "rows"), [(257, 128, 384), (256, 128, 256), (1, 128, 128), (7, 1, 7)]
)
def test_the_embedding_has_the_next_multiple_of_rows(
    vocab_size: int, multiple: int, rows: int
) -> None:
    model = ModelConfig(vocab_size=vocab_size, vocab_multiple=multiple)
    assert model.padded_vocab_size == rows
