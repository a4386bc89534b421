"""Parameters of a recipe's model, counted without building it, and the arithmetic of its steps."""

from __future__ import annotations

from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import ModelConfig


def model_parameters(config: RunConfig) -> dict[str, int]:
    """Parameters by part; tied embeddings count once."""
    m = config.model
    embedding = m.padded_vocab_size * m.hidden_size
    parts = {"embedding": embedding, **_layers(config, m.num_layers, tp=1)}
    parts["norms"] += m.hidden_size
    parts["output"] = 0 if m.tie_embeddings else embedding
    return parts


def rank_parameters(config: RunConfig, stage: int) -> dict[str, int]:
    """Parameters that a rank of pipeline stage `stage` holds, by part.

    With tied embeddings and several stages the last one holds a copy of the embedding as "output".
    """
    m, p = config.model, config.parallel
    embedding = m.padded_vocab_size // p.tp * m.hidden_size
    first, last = stage == 0, stage == p.pp - 1
    parts = {"embedding": embedding if first else 0}
    parts |= _layers(config, m.num_layers // p.pp, p.tp)
    parts["norms"] += m.hidden_size if last else 0
    parts["output"] = embedding if last and not (first and m.tie_embeddings) else 0
    return parts


def _layers(config: RunConfig, num_layers: int, tp: int) -> dict[str, int]:
    m = config.model
    heads, groups, d = m.num_attention_heads, m.num_query_groups, m.kv_channels
    attention = m.hidden_size * d * (2 * heads + 2 * groups) // tp
    mlp = 3 * m.hidden_size * m.ffn_hidden_size // tp
    norms = 2 * m.hidden_size
    return {
        k: num_layers * v for k, v in [("attention", attention), ("mlp", mlp), ("norms", norms)]
    }


DENSE_BF16_TFLOPS = {"H100": 989.4, "H200": 989.4, "H800": 989.4}
"""Rates of SXM modules from data sheets, by a word of the device's name."""


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 rate of a GPU; None for one that is not in the table, or another form of it."""
    if "PCIe" in device_name or "NVL" in device_name:
        return None
    rates = [rate for word, rate in DENSE_BF16_TFLOPS.items() if word in device_name]
    return rates[0] if rates else None


def matmul_parameters(model: ModelConfig) -> int:
    """Weights that every token is multiplied with, the output projection included."""
    heads, groups, d = model.num_attention_heads, model.num_query_groups, model.kv_channels
    attention = model.hidden_size * d * (2 * heads + 2 * groups)
    mlp = 3 * model.hidden_size * model.ffn_hidden_size
    return model.num_layers * (attention + mlp) + model.hidden_size * model.vocab_size


def step_flops(model: ModelConfig, num_tokens: int, area: int) -> int:
    """Forward and backward of `num_tokens` whose masks show `area` cells in all.

    A weight costs 6 per token (2 forward, 4 backward), and a visible cell 12 * head_dim per query
    head (two products of 2 forward, twice that backward). Recomputation and hidden cells do not
    count.
    """
    cells = 12 * model.num_layers * model.num_attention_heads * model.kv_channels * area
    return 6 * matmul_parameters(model) * num_tokens + cells
