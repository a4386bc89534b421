"""The norm of machines without TransformerEngine and apex."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_magi.adapter.rms_norm import LocalNorm, RMSNorm


def config(**changes: Any) -> Any:
    values = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False}
    values |= {"sequence_parallel": True, "params_dtype": torch.float64}
    return SimpleNamespace(**(values | changes))


def test_it_is_the_definition() -> None:
    norm = RMSNorm(config(), 6, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(6.0))
    x = torch.randn(3, 2, 6, dtype=torch.float64)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * torch.arange(6.0)
    torch.testing.assert_close(norm(x), want)


@pytest.mark.parametrize("parallel", [False, True])
def test_its_weight_says_whether_gradients_are_partial(parallel: bool) -> None:
    norm = RMSNorm(config(sequence_parallel=parallel, params_dtype=torch.bfloat16), 4)
    assert norm.weight.sequence_parallel is parallel and norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "changes", [{"normalization": "LayerNorm"}, {"layernorm_zero_centered_gamma": True}], ids=str
)
def test_other_norms_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="requires normalization='RMSNorm' without"):
        RMSNorm(config(**changes), 4)


def test_torchs_norm_where_it_works() -> None:
    made = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1,
                             normalization="RMSNorm")  # fmt: skip
    assert not isinstance(LocalNorm(made, 4, eps=1e-5), RMSNorm)
    assert isinstance(LocalNorm(config(), 4, eps=1e-5), RMSNorm)
