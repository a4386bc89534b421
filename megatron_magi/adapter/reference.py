"""The yardstick: context parallelism 1 with Megatron's own dense attention and a dense mask."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_magi.adapter.batch import Batch, LocalBatch


def dense_batch(batch: Batch, cu_seqlens: Sequence[int]) -> LocalBatch:
    """A batch for a stock model (llama_layer_spec(..., attention="stock")), CP 1 only.

    Attention is causal inside each document, by a dense bool [1, 1, T, T] mask in Megatron's
    convention (True = hidden). Nothing of ours runs in the model: RoPE keeps stream positions,
    which gives the same attention because RoPE only depends on distances.
    """
    raise NotImplementedError
