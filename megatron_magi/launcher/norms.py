"""Norms for sequence parallelism where TransformerEngine and apex are absent."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import transformer_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_magi.adapter.layer_spec import with_own_norms
from megatron_magi.adapter.rms_norm import LocalNorm

HAS_FUSED_NORMS = transformer_block.LayerNormImpl is not WrappedTorchNorm
"""True if TransformerEngine or apex is installed; read before magi's hook replaces the name."""


def own_norms(spec: Any, config: Any) -> Any:
    """The spec with magi's RMSNorm for torch's under sequence parallelism, else unchanged.

    Raises:
        NotImplementedError: a LayerNorm, which has no replacement here.
    """
    if not config.sequence_parallel or HAS_FUSED_NORMS:
        return spec
    check_local_norm(config.normalization, config.sequence_parallel)
    return with_own_norms(spec)


def check_local_norm(normalization: str, splits_sequence: bool) -> None:
    """Refuse a norm that neither Megatron's stand-in for fused norms nor ours can be.

    Raises:
        NotImplementedError: a LayerNorm under sequence parallelism.
    """
    if splits_sequence and normalization != "RMSNorm" and not HAS_FUSED_NORMS:
        raise NotImplementedError(
            f"--sequence-parallel without TransformerEngine or apex requires --normalization "
            f"RMSNorm, got {normalization}; install one of them or change the norm"
        )


def own_final_norm(original: Any, launch: Any) -> Any:
    """For the norm after the last layer, which no layer spec holds."""
    return original if HAS_FUSED_NORMS else LocalNorm
