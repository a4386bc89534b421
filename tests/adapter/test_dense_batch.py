"""The dense baseline's batch."""

from __future__ import annotations

import torch

from megatron_magi.adapter.rank_batch import Batch
from tests.adapter.dense_batch import dense_batch


def stream(length: int) -> Batch:
    tokens = torch.arange(length)[None]
    return Batch(tokens, tokens + 1, torch.full((1, length), 0.5), tokens + 100)


def test_dense_baseline_mask() -> None:
    hidden = dense_batch(stream(4), [0, 1, 4]).attention_mask
    assert hidden.shape == (1, 1, 4, 4)
    visible = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert (~hidden[0, 0]).int().tolist() == visible
