"""Norms over the last dimension."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, replicated


class RMSNorm(TransformerEngineBaseModule):
    """TransformerEngine's RMS norm."""

    def __init__(
        self,
        normalized_shape: int = 0,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        start = torch.full((normalized_shape,), float(not zero_centered_gamma), dtype=params_dtype)
        self.weight = replicated(start, sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """The norm."""
        return F.rms_norm(x, self.weight.shape, self.weight + self.zero_centered_gamma, self.eps)


class LayerNorm(RMSNorm):
    """TransformerEngine's layer norm."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.bias = replicated(torch.zeros_like(self.weight), self.weight.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """The norm."""
        weight = self.weight + self.zero_centered_gamma
        return F.layer_norm(x, self.weight.shape, weight, self.bias, self.eps)
