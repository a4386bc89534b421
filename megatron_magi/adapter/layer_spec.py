"""Layer specs with our core attention: a provider, a transform of any spec, a Llama convenience."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def with_magi_attention(spec: Any) -> Any:
    """The same spec with every self-attention's core attention replaced by ours.

    Args:
        spec: ModuleSpec of a layer, TransformerBlockSubmodules, MTP block spec, functools.partial
            around any of them, lists of them. Not changed in place.

    Raises:
        ValueError: nothing was replaced.
    """
    raise NotImplementedError


def llama_layer_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    *,
    attention: str = "magi",
) -> TransformerBlockSubmodules:
    """Block spec of a pre-norm RMSNorm decoder (dense or MoE by config) for this pipeline stage.

    Uses Megatron's own local layers and our RMSNorm (works with sequence parallelism, also as the
    final norm). attention="stock" keeps Megatron's DotProductAttention: the dense reference.
    Give it as `GPTModel(transformer_layer_spec=llama_layer_spec(config, vp_stage=...), ...)`.
    """
    raise NotImplementedError
