"""What the stand-in's layers share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TransformerEngineBaseModule(torch.nn.Module):
    """A layer of TransformerEngine; Megatron asks for this class in a few places."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The ranks that share the weight."""
        self.tp_group = tp_group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """There is no quantization and so nothing to prepare."""


def new_weight(
    shape: tuple[int, ...], dtype: torch.dtype | None, init: Any, split_dim: int | None
) -> torch.nn.Parameter:
    """A parameter with the marks of tensor parallelism that Megatron reads."""
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    if init is not None:
        with torch.no_grad():
            init(weight)
    weight.tensor_model_parallel = split_dim is not None  # type: ignore[attr-defined]
    weight.partition_dim = 0 if split_dim is None else split_dim  # type: ignore[attr-defined]
    weight.partition_stride = 1  # type: ignore[attr-defined]
    return weight


def replicated(data: Tensor, sequence_parallel: bool) -> torch.nn.Parameter:
    """A parameter that all ranks hold; under sequence parallelism its gradients are summed."""
    parameter = torch.nn.Parameter(data)
    parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    return parameter
