"""Any layer spec in, the same spec with our core attention out."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_magi.adapter.core_attention import MagiCoreAttention
from megatron_magi.adapter.layer_spec import (
    MagiSpecProvider,
    llama_layer_spec,
    with_magi_attention,
)
from megatron_magi.adapter.rms_norm import RMSNorm


def core_of(layer: Any) -> Any:
    return layer.submodules.self_attention.submodules.core_attention


def test_layer_spec_changes_in_one_place_and_not_in_place() -> None:
    spec = get_gpt_layer_local_spec(qk_layernorm=True)
    before = repr(spec)
    ours = with_magi_attention(spec)
    assert repr(spec) == before
    assert core_of(spec) is DotProductAttention
    assert core_of(ours) is MagiCoreAttention
    ours.submodules.self_attention.submodules.core_attention = DotProductAttention
    assert ours == spec


def test_block_spec_with_dense_and_moe_layers() -> None:
    layers = [get_gpt_layer_local_spec(), get_gpt_layer_local_spec(num_experts=4)]
    ours = with_magi_attention(TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm))
    assert [core_of(layer) for layer in ours.layer_specs] == [MagiCoreAttention] * 2
    assert ours.layer_norm is RMSNorm
    assert ours.layer_specs[0].submodules.mlp == layers[0].submodules.mlp


def test_partials_are_walked() -> None:
    layer = get_gpt_layer_local_spec()
    attention = layer.submodules.self_attention
    layer.submodules.self_attention = functools.partial(
        attention.module, submodules=attention.submodules
    )
    ours = with_magi_attention(layer).submodules.self_attention
    assert ours.func is attention.module
    assert ours.keywords["submodules"].core_attention is MagiCoreAttention


def test_multi_token_prediction_spec() -> None:
    mtp = get_mtp_layer_spec_for_backend(get_gpt_layer_local_spec(), backend=MagiSpecProvider())
    block = with_magi_attention(MultiTokenPredictionBlockSubmodules(layer_specs=[mtp]))
    submodules = block.layer_specs[0].submodules
    assert core_of(submodules.mtp_model_layer) is MagiCoreAttention


def test_applying_twice_is_the_same() -> None:
    once = with_magi_attention(get_gpt_layer_local_spec())
    assert with_magi_attention(once) == once


def test_nothing_to_replace_is_an_error() -> None:
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention = IdentityOp
    with pytest.raises(ValueError, match=r"requires a spec that holds a self-attention .*got"):
        with_magi_attention(layer)


def test_cross_attention_stays() -> None:
    cross = ModuleSpec(
        module=CrossAttention,
        submodules=CrossAttentionSubmodules(
            linear_q=ColumnParallelLinear,
            linear_kv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=ColumnParallelLinear,
        ),
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.cross_attention = cross
    assert with_magi_attention(layer).submodules.cross_attention == cross


def test_foreign_core_attention_is_refused() -> None:
    class SparseAttention: ...

    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = SparseAttention
    with pytest.raises(ValueError, match=r"is one of DotProductAttention.*got .*SparseAttention"):
        with_magi_attention(layer)


@pytest.mark.parametrize("attention", ["magi", "stock"])
def test_llama_block_for_a_pipeline_stage(attention: Any) -> None:
    config = TransformerConfig(
        num_layers=6,
        hidden_size=8,
        num_attention_heads=2,
        normalization="RMSNorm",
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )
    block = llama_layer_spec(config, pp_rank=0, attention=attention)
    assert len(block.layer_specs) == 3
    norm = block.layer_specs[0].submodules.input_layernorm
    assert (norm is RMSNorm) == (block.layer_norm is RMSNorm) == (attention == "magi")
    wanted = MagiCoreAttention if attention == "magi" else DotProductAttention
    assert core_of(block.layer_specs[0]) is wanted


def test_provider_serves_megatrons_spec_builders() -> None:
    provider = MagiSpecProvider()
    assert provider.core_attention() is MagiCoreAttention
    assert provider.layer_norm(rms_norm=True) is RMSNorm
    assert provider.layer_norm() is not RMSNorm
    assert provider.fuse_layernorm_and_linear() is False
    assert get_mlp_module_spec_for_backend(backend=provider) is not None
    assert get_moe_module_spec_for_backend(backend=provider, num_experts=4) is not None


def test_sparse_attention_of_a_hybrid_stack_stays() -> None:
    @dataclasses.dataclass
    class Stack:
        attention_layer: Any
        dsa_layer: Any

    sparse = get_gpt_layer_local_spec()
    sparse.submodules.self_attention.submodules.core_attention = IdentityOp
    stack = Stack(get_gpt_layer_local_spec(), sparse)
    ours = with_magi_attention(ModuleSpec(module=IdentityOp, submodules=stack)).submodules
    assert core_of(ours.attention_layer) is MagiCoreAttention
    assert ours.dsa_layer is sparse
