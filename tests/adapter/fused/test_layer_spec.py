"""Which modules of a layer spec are exchanged for fused ones, and that nothing else is."""

import pytest

import tests.adapter.interpreter  # noqa: F401  # isort: skip

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused.norm import BlockRMSNorm, FusedRMSNorm, add_rows_past_norm
from megatron_magi.adapter.fused.parts import FusedParts
from megatron_magi.adapter.fused.qkv_rope import FusedSelfAttention
from megatron_magi.adapter.fused.swiglu import SwiGLU
from megatron_magi.adapter.layer_spec import with_fused_parts


def test_only_megatrons_self_attention_is_exchanged():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    fused = with_fused_parts(spec, FusedParts(qkv_rope="triton"))
    assert fused.submodules.self_attention.module is FusedSelfAttention
    assert spec.submodules.self_attention.module is not FusedSelfAttention, "not in place"
    same = (fused.submodules.mlp, fused.submodules.self_attention.submodules)
    assert same == (spec.submodules.mlp, spec.submodules.self_attention.submodules)
    assert with_fused_parts(spec, FusedParts()) is spec
    with pytest.raises(ValueError, match=r"without one for qkv_rope; set model\.fused=off"):
        with_fused_parts(fused, FusedParts(qkv_rope="triton"))


def test_norms_and_activation_are_exchanged():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    fused = with_fused_parts(spec, FusedParts(swiglu="triton", norm="triton")).submodules
    assert (fused.input_layernorm, fused.pre_mlp_layernorm) == (BlockRMSNorm, BlockRMSNorm)
    assert (fused.self_attn_bda, fused.mlp_bda) == (add_rows_past_norm, add_rows_past_norm)
    assert mlp_submodules(fused.mlp).activation_func is SwiGLU
    assert mlp_submodules(spec.submodules.mlp).activation_func is None
    assert fused.self_attention == spec.submodules.self_attention


def test_a_norm_leaves_rows_only_for_megatrons_addition():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    spec.submodules.mlp_bda = own_addition
    fused = with_fused_parts(spec, FusedParts(norm="triton")).submodules
    assert (fused.input_layernorm, fused.self_attn_bda) == (BlockRMSNorm, add_rows_past_norm)
    assert (fused.pre_mlp_layernorm, fused.mlp_bda) == (FusedRMSNorm, own_addition)
    attention = fused.self_attention.submodules
    assert (attention.q_layernorm, attention.k_layernorm) == (FusedRMSNorm, FusedRMSNorm)


def own_addition(training, fused): ...


def mlp_submodules(mlp):
    """Of a ModuleSpec, or of what newer versions of Megatron hold: a functools.partial."""
    return mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]
