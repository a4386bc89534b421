"""A batch with a dense mask, for the baseline: context parallelism 1, Megatron's own attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from megatron_magi.adapter.rank_batch import Batch, LocalBatch


@dataclass
class DenseBatch(LocalBatch):
    """Rows with a dense mask in place of plans."""

    packed_seq_params: Any
    attention_mask: torch.Tensor

    def model_inputs(self) -> dict[str, Any]:
        return {**super().model_inputs(), "attention_mask": self.attention_mask}


def dense_batch(batch: Batch, cu_seqlens: npt.ArrayLike) -> DenseBatch:
    """A batch for a stock model (`llama_layer_spec(..., attention="stock")`), CP 1 only.

    Attention is causal inside each document, by a dense bool [1, 1, T, T] mask in Megatron's
    convention (True = hidden). None of our code runs in the model. RoPE keeps stream positions,
    which gives the same attention, because RoPE depends on distances only.
    """
    assert batch.tokens is not None, "the baseline embeds tokens"
    total = batch.tokens.shape[1]
    device = batch.tokens.device
    bounds = torch.as_tensor(cu_seqlens, dtype=torch.int64, device=device)
    index = torch.arange(total, device=device)
    document = torch.searchsorted(bounds, index, right=True)
    hidden = (document[:, None] != document[None, :]) | (index[None, :] > index[:, None])
    return DenseBatch(batch, None, hidden[None, None])
