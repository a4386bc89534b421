"""Rows of one microbatch on one process."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_magi.adapter.batch import Batch, dispatch_batch
from megatron_magi.adapter.packed import make_packed_seq_params


def model(**changes: object) -> TransformerConfig:
    settings = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, **changes}
    return TransformerConfig(**settings)


def stream(length: int) -> Batch:
    tokens = torch.arange(length)[None]
    return Batch(tokens, tokens + 1, torch.full((1, length), 0.5), tokens + 100)


def test_one_rank_keeps_every_row() -> None:
    packed = make_packed_seq_params([0, 3, 8], model(), None, device="cpu")
    local = dispatch_batch(stream(8), packed, None)
    inputs = local.model_inputs()
    assert inputs["input_ids"].tolist() == [list(range(8))]
    assert inputs["labels"].tolist() == [list(range(1, 9))]
    assert inputs["position_ids"].tolist() == [list(range(100, 108))]
    assert inputs["packed_seq_params"] is packed
    assert inputs["attention_mask"] is None
    assert local.loss_mask.tolist() == [[0.5] * 8]


def test_stage_without_data() -> None:
    packed = make_packed_seq_params([0, 8], model(), None, device="cpu")
    local = dispatch_batch(None, packed, None)
    assert local.loss_mask is None
    assert local.model_inputs()["input_ids"] is None
    assert local.model_inputs()["packed_seq_params"] is packed


def test_batch_of_another_length() -> None:
    packed = make_packed_seq_params([0, 8], model(), None, device="cpu")
    with pytest.raises(ValueError, match=r"tokens must be one packed stream of shape \(1, 8\)"):
        dispatch_batch(stream(9), packed, None)
    short = stream(8)
    short.loss_mask = short.loss_mask[0]
    with pytest.raises(ValueError, match=r"loss_mask must be .* got \(8,\); pack the batch"):
        dispatch_batch(short, packed, None)
