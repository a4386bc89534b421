"""Norms for sequence parallelism where TransformerEngine and apex are absent."""

from __future__ import annotations

import importlib.util
from typing import Any

from megatron.core.transformer import transformer_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_magi.adapter.layer_spec import with_own_norms
from megatron_magi.adapter.rms_norm import RMSNorm


def own_norms(spec: Any, config: Any) -> Any:
    """The spec with our RMSNorm for torch's under sequence parallelism, else unchanged.

    Raises:
        NotImplementedError: a LayerNorm, which has no replacement here.
    """
    if not config.sequence_parallel or transformer_block.LayerNormImpl is not WrappedTorchNorm:
        return spec
    if config.normalization != "RMSNorm":
        raise NotImplementedError(
            f"sequence parallelism without TransformerEngine or apex requires --normalization "
            f"RMSNorm, got {config.normalization}; install one of them or change the norm"
        )
    return with_own_norms(spec)


def own_final_norm(original: Any, launch: Any) -> Any:
    """For the norm behind the last layer, which no spec of a layer holds.

    Torch's norm without sequence parallelism, so that nothing changes there.
    """
    if original is not WrappedTorchNorm:
        return original

    class FinalNorm:
        def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
            kind = RMSNorm if config.sequence_parallel else WrappedTorchNorm
            return kind(config, *args, **kwargs)

    return FinalNorm


def own_hybrid_norm(original: Any, launch: Any) -> Any:
    """For the last norm of a hybrid stack, which Megatron takes from TransformerEngine alone."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return original
    return own_final_norm(WrappedTorchNorm, launch)
