"""Norms for sequence parallelism where TransformerEngine and apex are absent."""

from __future__ import annotations

import importlib.util
from typing import Any

from megatron.core.transformer import transformer_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_magi.adapter.layer_spec import with_own_norms
from megatron_magi.adapter.rms_norm import RMSNorm

HAS_FUSED_NORMS = transformer_block.LayerNormImpl is not WrappedTorchNorm
"""Whether TransformerEngine or apex is there; read before our hook takes the name's place."""


def own_norms(spec: Any, config: Any) -> Any:
    """The spec with our RMSNorm for torch's under sequence parallelism, else unchanged.

    Raises:
        NotImplementedError: a LayerNorm, which has no replacement here.
    """
    if not config.sequence_parallel or HAS_FUSED_NORMS:
        return spec
    if config.normalization != "RMSNorm":
        raise NotImplementedError(
            f"sequence parallelism without TransformerEngine or apex requires --normalization "
            f"RMSNorm, got {config.normalization}; install one of them or change the norm"
        )
    return with_own_norms(spec)


class FinalNorm:
    """Behind the last layer: ours under sequence parallelism, else torch's as ever."""

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """A norm module; Megatron's constructor."""
        kind = RMSNorm if config.sequence_parallel else WrappedTorchNorm
        return kind(config, *args, **kwargs)


def own_final_norm(original: Any, launch: Any) -> Any:
    """For the norm behind the last layer, which no spec of a layer holds."""
    return original if HAS_FUSED_NORMS else FinalNorm


def own_hybrid_norm(original: Any, launch: Any) -> Any:
    """For the last norm of a hybrid stack, which Megatron takes from TransformerEngine alone."""
    return original if importlib.util.find_spec("transformer_engine") is not None else FinalNorm
