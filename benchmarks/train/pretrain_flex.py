"""A baseline for documents: TransformerEngine's layers with PyTorch's FlexAttention inside.

    --spec benchmarks.train.pretrain_flex layer_spec

Nothing of ours is in it: Megatron packs the documents and rotates them by its own positions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.train.pretrain_sdpa import with_core


class FlexDocuments(MegatronModule):  # type: ignore[misc]
    """Megatron's core-attention protocol for packed documents, each causal inside."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config=config)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any,
        packed_seq_params: Any = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """[t, heads, d] and [t, groups, d] -> [t, heads, d]."""
        mask = block_mask(packed_seq_params.cu_seqlens_q, len(query))
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = compiled()(q, k, v, block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).contiguous()


@functools.lru_cache(maxsize=1)
def compiled() -> Any:
    """FlexAttention as its users run it."""
    return torch.compile(flex_attention)


_last: tuple[Tensor, BlockMask] | None = None
"""The boundaries of the last microbatch, and their mask: the layers of a microbatch are alike."""


def block_mask(cu_seqlens: Tensor, tokens: int) -> BlockMask:
    """Which blocks of keys a block of queries sees, for documents that end at these boundaries."""
    global _last
    if _last is not None and _last[0] is cu_seqlens:
        return _last[1]
    positions = torch.arange(tokens, device=cu_seqlens.device)
    document = torch.bucketize(positions, cu_seqlens.reshape(-1), right=True)

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (document[q] == document[k]) & (q >= k)

    mask = create_block_mask(sees, None, None, tokens, tokens, device=str(cu_seqlens.device))
    _last = cu_seqlens, mask
    return mask


layer_spec = with_core(get_gpt_layer_with_transformer_engine_spec(), FlexDocuments)
