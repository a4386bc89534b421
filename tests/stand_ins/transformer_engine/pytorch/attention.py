"""Dense softmax attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


class DotProductAttention(TransformerEngineBaseModule):
    """TransformerEngine's core attention for whole sequences on one context-parallel rank."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        softmax_scale: float | None = None,
        cp_group: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        if cp_group is not None and cp_group.size() > 1:
            raise NotImplementedError(
                f"the stand-in's attention requires one context-parallel rank, got "
                f"{cp_group.size()}; it is a yardstick, use the plugin"
            )
        head_dim = kv_channels[0] if isinstance(kv_channels, tuple) else kv_channels
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(head_dim)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: str = "causal",
        qkv_format: str = "sbhd",
        **unused: Any,
    ) -> Tensor:
        """[rows, batch, heads, head_dim] -> [rows, batch, heads * head_dim]; causal, or a mask.

        With qkv_format thd there is no batch, and cu_seqlens_q has the documents.

        Args:
            attention_mask: bool [batch or 1, 1, rows, rows], True where nothing is seen.
        """
        if qkv_format == "thd":
            rows = [x.unsqueeze(1) for x in (query_layer, key_layer, value_layer)]
            hidden = _hidden_by_documents(query_layer.shape[0], unused["cu_seqlens_q"])
            return self._attend(*rows, hidden).squeeze(1)
        if qkv_format != "sbhd":
            raise NotImplementedError(
                f"the stand-in's attention requires qkv_format sbhd or thd, got {qkv_format}"
            )
        count = query_layer.shape[0]
        hidden = torch.ones(count, count, dtype=torch.bool, device=query_layer.device).triu(1)
        if attn_mask_type != "causal" and attention_mask is not None:
            hidden = attention_mask
        return self._attend(query_layer, key_layer, value_layer, hidden)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores = (q @ k.transpose(2, 3)).float() * self.softmax_scale
        probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
        return (probabilities @ v).permute(2, 0, 1, 3).flatten(2).contiguous()


def _hidden_by_documents(count: int, cu_seqlens: Tensor) -> Tensor:
    """bool [1, 1, rows, rows]: what is later, or of another document, is not seen."""
    places = torch.arange(count)
    document = torch.bucketize(places, cu_seqlens.cpu().long(), right=True)
    return ((document[:, None] != document) | (places[:, None] < places))[None, None]
