"""Arithmetic of a training step: parameters in matrix products and visible attention cells."""

from __future__ import annotations

from megatron_magi.training.config import ModelConfig


def matmul_parameters(model: ModelConfig) -> int:
    """Weights that every token is multiplied with, the output projection included."""
    heads, groups, d = model.num_attention_heads, model.num_query_groups, model.kv_channels
    attention = model.hidden_size * d * (2 * heads + 2 * groups)
    mlp = 3 * model.hidden_size * model.ffn_hidden_size
    return model.num_layers * (attention + mlp) + model.hidden_size * model.vocab_size


def step_flops(model: ModelConfig, num_tokens: int, area: int) -> int:
    """Forward and backward of `num_tokens` whose masks show `area` cells in all.

    A weight costs 6 a token (2 forward, 4 backward), a visible cell 12 * head_dim a query head (two
    products of 2 forward, twice that backward); nothing is counted for recomputation or hidden
    cells.
    """
    cells = 12 * model.num_layers * model.num_attention_heads * model.kv_channels * area
    return 6 * matmul_parameters(model) * num_tokens + cells
