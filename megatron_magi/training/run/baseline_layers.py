"""The baselines: attention of PyTorch alone inside Megatron's layer.

Nothing here comes from our adapter, planner, runtime or kernels. The mask is passed as Megatron's
`attention_mask`: the document number of every token. Positions count through a whole sample. RoPE
depends only on differences of positions, so documents that start at 0 give the same function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron_magi.training.estimate.memory import MASKS_KEPT
from megatron_magi.training.recipe.recipe_error import RecipeError


class PlainAttention(MegatronModule):  # type: ignore[misc]
    """Drop-in for Megatron's DotProductAttention; see `FlexPlainAttention`, `SdpaAttention`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **unused: Any
    ) -> Tensor:
        """Causal attention inside each document.

        Args:
            query: [rows, 1, heads, head_dim]; key, value: [rows, 1, kv heads, head_dim].
            attention_mask: int32 [rows], the document number of every row, not decreasing.

        Returns:
            [rows, 1, heads * head_dim].
        """
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = self.attend(q, k, v, attention_mask)
        return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        """[1, heads, rows, head_dim]; k and v may have fewer heads than q."""
        raise NotImplementedError


class FlexPlainAttention(PlainAttention):
    """torch.nn.attention.flex_attention, compiled; needs a GPU."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        """See the base."""
        mask = _block_masks(documents)
        return _flex()(
            q, k, v, block_mask=mask, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )


class SdpaAttention(PlainAttention):
    """scaled_dot_product_attention: its causal kernel, or an explicit mask for documents."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        """See the base. Several documents need a mask of rows x rows bytes."""
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        visible = _dense_masks(documents)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, scale=self.softmax_scale
        )


KINDS: dict[str, type[PlainAttention]] = {"flex_plain": FlexPlainAttention, "sdpa": SdpaAttention}


def plain_layer_spec(
    config: TransformerConfig, attention: str, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Megatron's local layers and norms; `attention` names one of `KINDS`."""
    if attention == "flex_plain" and not torch.cuda.is_available():
        raise RecipeError(
            "attention: flex_plain needs a GPU (PyTorch's FlexAttention has no backward pass on "
            "the CPU), got none; set attention=sdpa or attention=dense"
        )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = KINDS[attention]
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=WrappedTorchNorm)


class _LastMasks:
    """The newest masks, by the tensor of document numbers that they were made from."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self.make = make
        self.kept: list[tuple[Tensor, Any]] = []

    def __call__(self, documents: Tensor) -> Any:
        for known, mask in self.kept:
            if known.data_ptr() == documents.data_ptr():
                return mask
        self.kept = [*self.kept[1 - MASKS_KEPT :], (documents, self.make(documents))]
        return self.kept[-1][1]


def _block_mask(documents: Tensor) -> BlockMask:
    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (documents[q] == documents[k]) & (k <= q)

    rows = len(documents)
    return create_block_mask(
        visible, None, None, rows, rows, device=documents.device, _compile=True
    )


def _dense_mask(documents: Tensor) -> Tensor | None:
    """bool [1, 1, rows, rows], True = visible; None for one document."""
    if bool(documents[0] == documents[-1]):
        return None
    same = documents[:, None] == documents[None, :]
    return same.tril()[None, None]


_block_masks = _LastMasks(_block_mask)
_dense_masks = _LastMasks(_dense_mask)


@lru_cache(maxsize=1)
def _flex() -> Any:
    """flex_attention, compiled once; uncompiled, it would store all scores."""
    return torch.compile(flex_attention, dynamic=False)
