"""A hybrid stack that needs no TransformerEngine: attention, MLP, MoE and layers with state.

Megatron's own hybrid specs consist of TransformerEngine's layers. This one is built from parts of
the local GPT layer: `--spec megatron_magi.adapter.hybrid_spec hybrid_local_spec`. It works with and
without magi's attention.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_magi.adapter.rms_norm import LocalNorm

HAS_LATENT_LAYERS = "mla_layer" in {
    field.name for field in dataclasses.fields(HybridStackSubmodules)
}
"""True if a pattern may have MLA layers, which came with 0.19."""

LOCAL_LAYERS = "*-EMG+" if HAS_LATENT_LAYERS else "*-EMG"
"""Symbols of a hybrid layer pattern: attention, MLP, MoE, Mamba, gated delta net, and multi-latent
attention."""


class LocalHybridStack(HybridStack):  # type: ignore[misc]
    """Megatron's stack with a local final norm, because the stock one needs TransformerEngine."""

    def __init__(self, config: Any, *, layer_type_list: list[str], **given: Any) -> None:
        """Megatron's constructor, as its hybrid model calls it.

        Raises:
            NotImplementedError: a layer that the local spec does not have.
        """
        others = sorted(set(layer_type_list) - set(LOCAL_LAYERS))
        if others:
            raise NotImplementedError(
                f"the local hybrid spec requires a layer pattern of {' '.join(LOCAL_LAYERS)}, got "
                f"{' '.join(others)}; leave these layers out or use Megatron's own spec"
            )
        super().__init__(config, layer_type_list=layer_type_list, post_layer_norm=False, **given)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = LocalNorm(config, config.hidden_size, eps=config.layernorm_epsilon)


def _with(layer: ModuleSpec, **parts: Any) -> ModuleSpec:
    """The layer with other submodules in these places."""
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, **parts))


ATTENTION_ALONE = {
    "input_layernorm": LocalNorm,
    "pre_mlp_layernorm": IdentityOp,
    "mlp": IdentityOp,
    "mlp_bda": IdentityFuncOp,
}
MLP_ALONE = {
    "input_layernorm": IdentityOp,
    "self_attention": IdentityOp,
    "self_attn_bda": IdentityFuncOp,
    "pre_mlp_layernorm": LocalNorm,
}
_dense = get_gpt_layer_local_spec()
# The number of experts comes from the config.
_moe = get_gpt_layer_local_spec(num_experts=1, moe_grouped_gemm=False)
_state = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
_mamba = MambaLayerSubmodules(
    norm=LocalNorm,
    mixer=ModuleSpec(module=MambaMixer, submodules=_state),
    mamba_bda=get_bias_dropout_add,
)
_delta_net = GatedDeltaNetSubmodules(
    in_proj=ColumnParallelLinear, out_norm=LocalNorm, out_proj=RowParallelLinear
)
_layers = {
    "attention_layer": _with(_dense, **ATTENTION_ALONE),
    "mlp_layer": dataclasses.replace(_with(_dense, **MLP_ALONE), module=MLPLayer),
    "moe_layer": _with(_moe, **MLP_ALONE),
    "mamba_layer": ModuleSpec(module=MambaLayer, submodules=_mamba),
    "gdn_layer": _with(
        _dense,
        **ATTENTION_ALONE,
        self_attention=ModuleSpec(module=GatedDeltaNet, submodules=_delta_net),
    ),
}
if HAS_LATENT_LAYERS:
    _latent = get_gpt_layer_local_spec(multi_latent_attention=True)
    _layers["mla_layer"] = _with(_latent, **ATTENTION_ALONE)

hybrid_local_spec = ModuleSpec(module=LocalHybridStack, submodules=HybridStackSubmodules(**_layers))
