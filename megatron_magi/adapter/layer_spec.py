"""Layer specs with magi's core attention: a provider, a transform of any spec, and a Llama spec."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import CrossAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from megatron_magi.adapter.core_attention import MagiCoreAttention
from megatron_magi.adapter.rms_norm import RMSNorm

REPLACEABLE = ("DotProductAttention", "TEDotProductAttention", "MagiCoreAttention")
"""Core attentions that compute the same function as magi's; any other kind is not replaced."""

OTHER_ATTENTION_FIELDS = ("dsa_layer",)
"""Fields of a hybrid stack's spec that stay as they are, because their attention is not softmax
over rows; `attach` refuses a model that builds one."""

Rule = Callable[[Any, str, Any], Any]
"""(owner, field name, value) -> the value to put there."""


class MagiSpecProvider:
    """Provides magi's core attention (and a local RMSNorm); all other modules come from `fallback`.

    It is for the spec builders that take a provider (`get_mlp_module_spec_for_backend`,
    `get_moe_module_spec_for_backend`, `get_mtp_layer_spec_for_backend`), whose protocol grows
    between Megatron versions.
    """

    fallback: Any = None  # while the object is copied

    def __init__(self, fallback: Any = None) -> None:
        self.fallback = fallback or LocalSpecProvider()

    def core_attention(self) -> type:
        """Our core attention."""
        return MagiCoreAttention

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, **kwargs: Any) -> Any:
        """The fallback's norm, but magi's for torch's, which refuses sequence parallelism."""
        norm = self.fallback.layer_norm(rms_norm=rms_norm, for_qk=for_qk, **kwargs)
        return RMSNorm if rms_norm and norm is WrappedTorchNorm else norm

    def __getattr__(self, name: str) -> Any:
        """All other modules are the fallback's."""
        return getattr(self.fallback, name)


def with_magi_attention(spec: Any) -> Any:
    """The same spec with every self-attention's core attention replaced by magi's.

    Args:
        spec: ModuleSpec of a layer, TransformerBlockSubmodules, MTP block spec, functools.partial
            around any of them, or lists of them. It is not changed in place.

    Raises:
        ValueError: nothing was replaced, or a core attention that is not plain softmax attention.
    """
    replaced = []

    def rule(owner: Any, name: str, value: Any) -> Any:
        if name != "core_attention" or isinstance(owner, CrossAttentionSubmodules) or not value:
            return value
        kind = value.module if isinstance(value, ModuleSpec) else value
        kind = kind.func if isinstance(kind, functools.partial) else kind
        if getattr(kind, "__name__", str(kind)) not in REPLACEABLE:
            raise ValueError(
                f"with_magi_attention requires a spec whose core attention is one of "
                f"{', '.join(REPLACEABLE)}, got {kind}; it computes something else, keep it"
            )
        replaced.append(owner)
        return MagiCoreAttention

    result = _rewrite(spec, rule)
    if not replaced:
        raise ValueError(
            f"with_magi_attention requires a spec that holds a self-attention with submodules, got "
            f"{type(spec).__name__} without any core_attention; pass a layer or block spec"
        )
    return result


def llama_layer_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    *,
    attention: Literal["magi", "stock"] = "magi",
) -> TransformerBlockSubmodules:
    """Block spec of a pre-norm RMSNorm decoder for this pipeline stage, from Megatron's own layers.

    All norms, the final one included, are magi's, which work with sequence parallelism. Everything
    else is Megatron's local implementation, dense or MoE (config.num_moe_experts, in every layer).
    attention="stock" keeps Megatron's layers and norms as they are, for the dense baseline.
    Use: `GPTModel(transformer_layer_spec=llama_layer_spec(config, vp_stage=i), vp_stage=i, ...)`.
    """
    layer = _local_layer(config, multi_latent_attention=config.multi_latent_attention)
    norm: Any = WrappedTorchNorm
    if attention == "magi":
        norm = RMSNorm
        layer = with_magi_attention(with_own_norms(layer))
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def with_own_norms(spec: Any) -> Any:
    """The same spec with magi's RMSNorm in place of torch's, which refuses sequence parallelism."""
    return _rewrite(spec, lambda _, __, value: RMSNorm if value is WrappedTorchNorm else value)


def llama_mtp_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    attention: Literal["magi", "stock"] = "magi",
) -> Any:
    """Spec of the multi-token prediction layers after a `llama_layer_spec` decoder.

    It is None on a pipeline stage without such layers. Every layer predicts one more token
    (config.mtp_num_layers). Use:
    `GPTModel(..., mtp_block_spec=llama_mtp_spec(config, vp_stage=i))`.
    """
    layer = _local_layer(config)
    block = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=vp_stage)
    if block is None or attention == "stock":
        return block
    return with_magi_attention(with_own_norms(block))


def _local_layer(config: TransformerConfig, **more: Any) -> Any:
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
        **more,
    )


def _rewrite(node: Any, rule: Rule) -> Any:
    """A spec tree with `rule` applied to every field; unchanged parts are shared, not copied."""
    if isinstance(node, list):
        items = [_rewrite(rule(node, "", item), rule) for item in node]
        return items if any(a is not b for a, b in zip(items, node, strict=True)) else node
    changed = {
        name: new
        for name, old in _children(node).items()
        if (new := _rewrite(rule(node, name, old), rule)) is not old
    }
    if not changed:
        return node
    if isinstance(node, functools.partial):
        func = changed.pop("func", node.func)
        return functools.partial(func, *node.args, **{**node.keywords, **changed})
    return dataclasses.replace(node, **changed)


def _children(node: Any) -> dict[str, Any]:
    """Named parts of a spec node; classes and everything else are leaves."""
    if isinstance(node, functools.partial):
        return {**node.keywords, "func": node.func}
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = {f.name for f in dataclasses.fields(node) if f.init} - {*OTHER_ATTENTION_FIELDS}
        return {name: getattr(node, name) for name in sorted(names)}
    return {}
