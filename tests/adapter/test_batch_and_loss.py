"""Rows and losses of one microbatch on one process."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_magi.adapter.batch import Batch, dispatch_batch
from megatron_magi.adapter.dense_batch import dense_batch
from megatron_magi.adapter.loss import check_loss_config, per_token_loss
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


def test_dense_baseline_mask() -> None:
    hidden = dense_batch(stream(4), [0, 1, 4]).attention_mask
    assert hidden.shape == (1, 1, 4, 4)
    visible = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert (~hidden[0, 0]).int().tolist() == visible


def test_loss_is_a_sum_with_its_count() -> None:
    output = torch.tensor([[1.0, 2.0, float("inf"), 4.0]], requires_grad=True)
    loss, count, report = per_token_loss(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), output)
    assert (float(loss.detach()), int(count)) == (5.0, 2)
    assert count.dtype == torch.int32
    assert report["lm loss"].tolist() == [5.0, 2.0]
    loss.backward()
    assert output.grad.tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_average_per_rank_is_refused_under_context_parallelism() -> None:
    check_loss_config(model(context_parallel_size=2, calculate_per_token_loss=True))
    check_loss_config(model())
    with pytest.raises(ValueError, match=r"requires calculate_per_token_loss=True, got False"):
        check_loss_config(model(context_parallel_size=2))
