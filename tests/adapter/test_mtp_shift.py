"""The roll of multi-token prediction on one process, and what it refuses."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig, multi_token_prediction

from megatron_magi.adapter.mtp import check_mtp, install_mtp, next_tokens
from megatron_magi.adapter.packed import MagiPackedSeqParams, make_packed_seq_params
from megatron_magi.config import MagiConfig

BOUNDS = [0, 1, 4, 9]


def model(**changes: Any) -> TransformerConfig:
    settings = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "mtp_num_layers": 2}
    return TransformerConfig(**{**settings, **changes})


def packed(chunk_size: int | None = None, **changes: Any) -> MagiPackedSeqParams:
    config = MagiConfig(chunk_size=chunk_size)
    return make_packed_seq_params(BOUNDS, model(**changes), None, magi_config=config, device="cpu")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's module with our functions in place, and its own ones again afterwards."""
    for name in ("roll_tensor", "process_mtp_loss"):
        for module in (multi_token_prediction, gpt_model):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name))
    helper = multi_token_prediction.MTPLossLoggingHelper
    for name in ("save_loss_to_tracker", "save_metrics_to_tracker"):
        if hasattr(helper, name):
            monkeypatch.setattr(helper, name, staticmethod(getattr(helper, name)))
    install_mtp()
    return multi_token_prediction


def test_it_is_megatrons_own_packed_roll(installed: Any) -> None:
    x = torch.arange(1, 10)[None]
    stock = PackedSeqParams(cu_seqlens_q=torch.tensor(BOUNDS))
    for depth in range(2):
        wanted, wanted_sum = installed.roll_tensor(x, packed_seq_params=stock)
        got, got_sum = installed.roll_tensor(x, shifts=-1, dims=-1, packed_seq_params=packed())
        assert torch.equal(got, wanted), depth
        assert int(got_sum) == int(wanted_sum) > 0
        x = wanted
    assert x.tolist() == [[0, 4, 0, 0, 7, 8, 9, 0, 0]]


def test_padding_is_zero() -> None:
    x = torch.ones(1, 12, dtype=torch.int64)
    assert next_tokens(x, packed(chunk_size=4)).tolist() == [[0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0]]


def test_flags_and_hidden_states() -> None:
    flags = torch.ones(1, 9, dtype=torch.bool)
    assert next_tokens(flags, packed()).tolist() == [[bool(n) for n in (0, 1, 1, 0, 1, 1, 1, 1, 0)]]
    x = torch.randn(2, 3, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    (next_tokens(x, packed()) * weight).sum().backward()
    back = torch.zeros_like(weight)
    back[..., 2:4], back[..., 5:] = weight[..., 1:3], weight[..., 4:8]
    assert torch.equal(x.grad, back)


def test_batches_of_others_get_the_stock_roll(installed: Any) -> None:
    rolled, total = installed.roll_tensor(torch.arange(1, 5)[None])
    assert rolled.tolist() == [[2, 3, 4, 0]]
    assert int(total) == 9


def test_models_without_position_ids(installed: Any) -> None:
    assert installed.roll_tensor(None, packed_seq_params=packed()) == (None, None)


def test_every_name_is_replaced_once(installed: Any) -> None:
    once = installed.roll_tensor
    install_mtp()
    assert installed.roll_tensor is once
    if hasattr(gpt_model, "roll_tensor"):
        assert gpt_model.roll_tensor is once
    if hasattr(installed, "process_mtp_loss"):
        assert gpt_model.process_mtp_loss is installed.process_mtp_loss
        assert hasattr(gpt_model.process_mtp_loss, "__wrapped__")


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("given", ["labels", "input_ids"])
def test_loss_of_one_rank_is_stock(installed: Any, per_token: bool, given: str) -> None:
    """Labels may be absent (reinforcement learning): from 0.19 on they are the tokens, rolled."""
    ours = installed.process_mtp_loss
    if given not in inspect.signature(ours).parameters:
        pytest.skip("this megatron-core needs labels")
    stock = PackedSeqParams(cu_seqlens_q=torch.tensor(BOUNDS))
    config = model(calculate_per_token_loss=per_token)
    gradients = []
    for function, params in ((ours.__wrapped__, stock), (ours, packed())):
        hidden = torch.randn(27, 1, 4, generator=torch.Generator().manual_seed(3))
        hidden.requires_grad_()
        arguments = {
            "labels": None,
            given: torch.arange(3, 12)[None],
            "loss_mask": torch.tensor([[1.0, 0, 1, 1, 0, 1, 0.5, 1, 1]]),
            "output_layer": lambda x, **unused: (x, None),
            "output_weight": None,
            "runtime_gather_output": None,
            "is_training": False,
            "compute_language_model_loss": lambda labels, x: x.square().sum(-1).T * labels,
            "config": config,
            "packed_seq_params": params,
        }
        function(hidden, **arguments).sum().backward()
        gradients.append(hidden.grad)
    assert gradients[0][9:].abs().max() > 0.1
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-6)


def test_other_shifts_and_other_models(installed: Any) -> None:
    x = torch.ones(1, 9)
    with pytest.raises(NotImplementedError, match=r"one to the left \(shifts=-1\), got -2; roll"):
        installed.roll_tensor(x, shifts=-2, packed_seq_params=packed())
    with pytest.raises(ValueError, match=r"last rows, got none; make them with make_packed"):
        next_tokens(x, packed(mtp_num_layers=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_standalone": True}, r"on the last pipeline stage here, got a pipeline_model"),
        ({"mtp_hsm": True, "context_parallel_size": 2}, r"mtp_hsm\) requires .*size=2 and"),
        ({"mtp_hsm": True, "sequence_parallel": True}, r"sequence_parallel=True; set mtp_hsm"),
    ],
)
def test_settings_it_cannot_honour(changes: dict[str, Any], message: str) -> None:
    settings = {
        "mtp_standalone": False,
        "mtp_hsm": False,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "recompute_method": None,
    }
    check_mtp(types.SimpleNamespace(**settings))
    with pytest.raises(NotImplementedError, match=message):
        check_mtp(types.SimpleNamespace(**{**settings, **changes}))
