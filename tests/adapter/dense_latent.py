"""The yardstick of multi-latent attention: Megatron's own core attention takes one width only."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_magi.adapter.layer_spec import _rewrite


class DenseLatentAttention(MegatronModule):
    """Softmax attention under a dense mask, True = hidden, with values of any width. CP 1."""

    def __init__(self, config: Any, softmax_scale: float, **unused: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **given: Any
    ) -> Tensor:
        """[T, batch, heads, head_dim] each, mask bool [1, 1, T, T]; [T, batch, heads * width]."""
        assert given["packed_seq_params"] is None
        scores = torch.einsum("tbhd,sbhd->bhts", query, key) * self.softmax_scale
        probs = scores.masked_fill(attention_mask, -torch.inf).softmax(-1)
        return torch.einsum("bhts,sbhd->tbhd", probs, value).flatten(2)


def with_dense_attention(spec: Any) -> Any:
    """The same spec with the stand-in as every layer's core attention."""

    def rule(owner: Any, name: str, value: Any) -> Any:
        return DenseLatentAttention if name == "core_attention" else value

    return _rewrite(spec, rule)
