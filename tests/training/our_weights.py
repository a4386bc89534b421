"""Weights under our names, every number of them another one."""

from __future__ import annotations

import torch

from megatron_magi.training.recipe.run_values import ModelConfig


def model_and_weights(
    groups: int, per_group: int, head_dim: int, tied: bool, layers: int = 2
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """A model and weights of ours in which every number is another one."""
    model = ModelConfig(
        num_layers=layers,
        hidden_size=6,
        ffn_hidden_size=5,
        num_attention_heads=groups * per_group,
        num_query_groups=groups,
        head_dim=head_dim,
        vocab_size=11,
        vocab_multiple=8,
        tie_embeddings=tied,
    )
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (16, 6)}
    for layer in range(layers):
        shapes |= {
            f"decoder.layers.{layer}.{name}.weight": shape
            for name, shape in [
                ("input_layernorm", (6,)),
                ("self_attention.linear_qkv", (groups * (per_group + 2) * head_dim, 6)),
                ("self_attention.linear_proj", (6, groups * per_group * head_dim)),
                ("pre_mlp_layernorm", (6,)),
                ("mlp.linear_fc1", (10, 6)),
                ("mlp.linear_fc2", (6, 5)),
            ]
        }
    shapes["decoder.final_layernorm.weight"] = (6,)
    if not tied:
        shapes["output_layer.weight"] = (16, 6)
    ours, begin = {}, 1
    for name, shape in shapes.items():
        size = int(torch.tensor(shape).prod())
        ours[name] = torch.arange(begin, begin + size, dtype=torch.float64).view(shape)
        begin += size
    return model, ours
