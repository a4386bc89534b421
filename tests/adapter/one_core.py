"""A core attention on one process, its inputs, and its scores by the definition."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType as MegatronMaskType
from torch import Tensor

from megatron_magi.adapter.core_attention import MagiCoreAttention

HEADS, GROUPS, DIM, ROWS = 4, 2, 8, 11
BOUNDS = [0, 1, 5, 11]


def attention(layer: int = 1, **changes: Any) -> MagiCoreAttention:
    config = TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": HEADS * DIM,
            "num_attention_heads": HEADS,
            "num_query_groups": GROUPS,
            "attention_dropout": 0.0,
            "params_dtype": torch.float64,
            **changes,
        }
    )
    module = MagiCoreAttention(
        config=config,
        layer_number=layer,
        attn_mask_type=MegatronMaskType.causal,
        attention_type="self",
    )
    module.is_attached = True
    return module


def qkv(batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    shapes = [(ROWS, batch, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def visible(window: int | None = None, bounds: list[int] | None = None) -> Tensor:
    """bool [T, T]: causal inside each document, at most `window` tokens back."""
    index = torch.arange(ROWS)
    document = torch.searchsorted(torch.tensor(bounds or BOUNDS), index, right=True)
    distance = index[:, None] - index[None]
    seen = (document[:, None] == document[None]) & (distance >= 0)
    return seen if window is None else seen & (distance <= window)


def scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """[batch, H, T, S] scaled scores, -inf where hidden."""
    k = k.repeat_interleave(HEADS // GROUPS, dim=2)
    found = torch.einsum("tbhd,sbhd->bhts", q, k) * DIM**-0.5
    return found.masked_fill(~seen, -torch.inf)
