"""Linear layers, split over tensor-parallel ranks by outputs (column) or inputs (row)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine.pytorch.distributed import enter_parallel, leave_parallel
from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    new_weight,
    replicated,
)

SPLIT_DIM = {"column": 0, "row": 1}
"""Dimension of a weight [outputs, inputs] that is split."""


class Linear(TransformerEngineBaseModule):
    """TransformerEngine's linear layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.parallel_mode, self.tp_size, self.tp_group = parallel_mode, tp_size, tp_group
        self.sequence_parallel = sequence_parallel and tp_size > 1 and parallel_mode is not None
        self.use_bias, self.return_bias = bias, return_bias
        sizes, split = [out_features, in_features], SPLIT_DIM.get(parallel_mode or "")
        if split is not None:
            sizes[split] //= tp_size
        self.out_features, self.in_features = sizes
        self.weight = new_weight((sizes[0], sizes[1]), params_dtype, init_method, split)
        self.bias = self._new_bias(params_dtype) if bias else None

    def _new_bias(self, dtype: torch.dtype | None) -> torch.nn.Parameter:
        if self.parallel_mode == "column":
            return new_weight((self.out_features,), dtype, None, 0)
        zeros = torch.zeros(self.out_features, dtype=dtype)
        return replicated(zeros, self.sequence_parallel and self.parallel_mode == "row")

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """The product; with return_bias the bias beside it, not added."""
        if self.parallel_mode == "column" and self.tp_size > 1:
            x = enter_parallel(x, self.tp_group, self.sequence_parallel)
        out = F.linear(x, self.weight)
        if self.parallel_mode == "row" and self.tp_size > 1:
            out = leave_parallel(out, self.tp_group, self.sequence_parallel)
        if self.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias


class LayerNormLinear(Linear):
    """A norm and a linear layer, with the norm's weight beside the linear one."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(in_features, out_features, **settings)
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        start = torch.full((in_features,), float(not zero_centered_gamma), dtype=self.weight.dtype)
        self.layer_norm_weight = replicated(start, self.sequence_parallel)
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = replicated(torch.zeros_like(start), self.sequence_parallel)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """The norm, then the product."""
        weight = self.layer_norm_weight + self.zero_centered_gamma
        if self.normalization == "RMSNorm":
            x = F.rms_norm(x, weight.shape, weight, self.eps)
        else:
            x = F.layer_norm(x, weight.shape, weight, self.layer_norm_bias, self.eps)
        return super().forward(x)


class GroupedLinear(TransformerEngineBaseModule):
    """One linear layer an expert, over rows that are sorted by expert; no exchanges."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.in_features, self.out_features = in_features, out_features
        split = SPLIT_DIM.get(parallel_mode or "")
        for number in range(num_gemms):
            weight = new_weight((out_features, in_features), params_dtype, init_method, split)
            self.register_parameter(f"weight{number}", weight)
            if bias:
                zeros = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype))
                self.register_parameter(f"bias{number}", zeros)

    def forward(
        self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Any:
        """The products; `m_splits` are the numbers of rows of each expert."""
        parts = x.split([int(count) for count in m_splits])
        biases = [getattr(self, f"bias{n}", None) for n in range(self.num_gemms)]
        added = [None if self.return_bias else bias for bias in biases]
        out = torch.cat(
            [F.linear(part, getattr(self, f"weight{n}"), added[n]) for n, part in enumerate(parts)]
        )
        return (out, biases) if self.return_bias else out
