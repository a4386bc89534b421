"""A peer in pretrain.py: Megatron's local layers with PyTorch's causal SDPA inside."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class CausalSdpa(MegatronModule):  # type: ignore[misc]
    """Megatron's core-attention protocol over scaled_dot_product_attention."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config=config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Tensor:
        """[s, b, heads, d] and [s, b, groups, d] -> [s, b, heads * d]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def with_core(layer: Any, core: type) -> Any:
    """A layer spec whose self-attention has this class as its core attention."""
    attention = layer.submodules.self_attention
    inside = dataclasses.replace(attention.submodules, core_attention=core)
    attention = dataclasses.replace(attention, submodules=inside)
    return dataclasses.replace(
        layer, submodules=dataclasses.replace(layer.submodules, self_attention=attention)
    )


layer_spec = with_core(get_gpt_layer_local_spec(normalization="RMSNorm"), CausalSdpa)
