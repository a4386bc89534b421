"""RMSNorm that works with sequence parallelism, for machines without TransformerEngine or apex."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """torch's rms_norm over the last dimension with Megatron's constructor.

    Megatron's `WrappedTorchNorm` refuses sequence parallelism because the gradient of a norm's
    weight is then partial on every tensor-parallel rank. Here the weight is marked
    `sequence_parallel`, which is enough to make Megatron's finalize_model_grads sum its gradient.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        super().__init__()
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise NotImplementedError(
                f"this norm requires normalization='RMSNorm' without zero-centered gamma, got "
                f"{config.normalization!r} and layernorm_zero_centered_gamma="
                f"{config.layernorm_zero_centered_gamma}; change the config or the layer spec"
            )
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LocalNorm:
    """A norm without TransformerEngine or apex: ours under sequence parallelism, else torch's."""

    def __new__(cls, config: TransformerConfig, *args: Any, **kwargs: Any) -> Any:
        """A norm module, from the arguments of Megatron's norms."""
        kind = RMSNorm if config.sequence_parallel else WrappedTorchNorm
        return kind(config, *args, **kwargs)
