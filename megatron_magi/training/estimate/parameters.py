"""Parameters of a recipe's model, in all and on one rank, counted without building it."""

from __future__ import annotations

from megatron_magi.training.recipe.config import RunConfig


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
