"""Which module of a layer spec is exchanged for the fused one, and that nothing else is."""

import pytest

import tests.adapter.interpreter  # noqa: F401  # isort: skip

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused.qkv_rope import FusedSelfAttention
from megatron_magi.adapter.layer_spec import with_fused_attention


def test_only_megatrons_self_attention_is_exchanged():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    fused = with_fused_attention(spec)
    assert fused.submodules.self_attention.module is FusedSelfAttention
    assert spec.submodules.self_attention.module is not FusedSelfAttention, "not in place"
    same = (fused.submodules.mlp, fused.submodules.self_attention.submodules)
    assert same == (spec.submodules.mlp, spec.submodules.self_attention.submodules)
    with pytest.raises(ValueError, match=r"self-attention, got \w+ without one; set model\.fused"):
        with_fused_attention(fused)
