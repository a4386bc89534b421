"""Norms without TransformerEngine and apex: ours where the sequence is split, else Megatron's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_magi.adapter.rms_norm import LocalNorm, RMSNorm
from megatron_magi.launcher import norms


@pytest.fixture
def layer() -> ModuleSpec:
    """A layer with torch's norms."""
    submodules = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm, pre_mlp_layernorm=WrappedTorchNorm
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def config(sequence_parallel: bool = True, normalization: str = "RMSNorm") -> Any:
    return SimpleNamespace(sequence_parallel=sequence_parallel, normalization=normalization)


def without_fused_norms(monkeypatch: pytest.MonkeyPatch, absent: bool = True) -> None:
    monkeypatch.setattr(norms, "HAS_FUSED_NORMS", not absent)


def test_a_split_sequence_has_our_norms(layer: ModuleSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    without_fused_norms(monkeypatch)
    made = norms.own_norms(layer, config()).submodules
    assert made.input_layernorm is made.pre_mlp_layernorm is RMSNorm
    assert layer.submodules.input_layernorm is WrappedTorchNorm, "the given spec is another's too"


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_a_whole_sequence_keeps_its_spec(
    normalization: str, layer: ModuleSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_fused_norms(monkeypatch)
    assert norms.own_norms(layer, config(False, normalization)) is layer


def test_fused_norms_stay(layer: ModuleSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """They know sequence parallelism, as LayerNorm and as RMSNorm."""
    without_fused_norms(monkeypatch, absent=False)
    assert norms.own_norms(layer, config()) is layer
    assert norms.own_norms(layer, config(normalization="LayerNorm")) is layer
    assert norms.own_final_norm(WrappedTorchNorm, None) is WrappedTorchNorm


def test_a_layer_norm_over_a_split_sequence_is_refused(
    layer: ModuleSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_fused_norms(monkeypatch)
    with pytest.raises(NotImplementedError, match="requires --normalization RMSNorm, got LayerN"):
        norms.own_norms(layer, config(normalization="LayerNorm"))


def test_the_norm_behind_the_last_layer_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fused_norms(monkeypatch)
    assert norms.own_final_norm(WrappedTorchNorm, None) is LocalNorm
