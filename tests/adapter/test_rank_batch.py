"""Rows of one microbatch on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig

from megatron_magi.adapter import rank_batch
from megatron_magi.adapter.packed import make_packed_seq_params
from megatron_magi.adapter.rank_batch import NUM_HASHED, Batch, batch_id_of, dispatch_batch


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


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"packed": None}, TypeError, "packed must be a MagiPackedSeqParams, got None; make it"),
        ({"packed": PackedSeqParams()}, TypeError, "packed must be .* got PackedSeqParams.*stock"),
        ({"batch": {"tokens": [1]}}, TypeError, "batch must be a Batch or None, got {'tokens'"),
        ({"batch": Batch([1] * 8)}, TypeError, r"tokens must be a Tensor, got \[1,"),
        ({"batch": Batch(torch.full((1, 8), 1.5))}, TypeError, "tokens must hold integers, got"),
        ({"batch_id": "a"}, TypeError, "batch_id must be an integer, got 'a'"),
        ({"batch_id": 1.5}, TypeError, "batch_id must be an integer, got 1.5"),
        ({"batch_id": 2**64 + 5}, ValueError, "batch_id must be between"),
    ],
)
def test_wrong_arguments_are_refused(
    given: dict[str, Any], error: type[Exception], said: str
) -> None:
    packed = make_packed_seq_params([0, 8], model(), None, device="cpu")
    arguments: dict[str, Any] = {"batch": stream(8), "packed": packed, "cp_group": None, **given}
    with pytest.raises(error, match=said):
        dispatch_batch(**arguments)


@pytest.mark.parametrize("batch_id", [-5, 2**64 - 1, torch.tensor(3)])
def test_a_batch_id_has_64_bits(batch_id: Any) -> None:
    packed = make_packed_seq_params([0, 8], model(), None, device="cpu")
    assert dispatch_batch(stream(8), packed, None, batch_id=batch_id).batch is not None


def test_batches_are_told_apart() -> None:
    tokens = torch.arange(3 * NUM_HASHED)
    ids = [batch_id_of(x) for x in (tokens, tokens + 1, tokens[:-1], tokens[:5], tokens[:4])]
    assert len(set(ids)) == len(ids) and all(0 <= each < 2**64 for each in ids)
    assert batch_id_of(tokens.int().reshape(1, 3, -1)) == ids[0]


@pytest.mark.parametrize(
    ("given", "batch_id", "said"),
    [
        ({}, None, batch_id_of(torch.arange(8))),
        ({"tokens": None}, None, batch_id_of(torch.arange(8) + 1)),
        ({}, 5, 5),
        ({"tokens": None, "labels": None}, None, 0),
    ],
    ids=["tokens", "labels", "the caller's", "neither"],
)
def test_every_dispatch_says_which_batch_it_is_of(
    given: dict[str, Any], batch_id: int | None, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(rank_batch, "agree_on_batch", lambda *call: calls.append(call))
    x = torch.arange(8)[None]
    rows = {"tokens": x, "labels": x + 1, "loss_mask": torch.ones(1, 8), **given}
    packed = make_packed_seq_params([0, 8], model(), None, device="cpu")
    dispatch_batch(Batch(**rows), packed, None, batch_id=batch_id)
    dispatch_batch(None, packed, None)  # a stage without rows says nothing
    assert calls == [(packed.token_plan, None, said, torch.device("cpu"))]
