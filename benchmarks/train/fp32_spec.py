"""The truth for gradients: Megatron's local layers with PyTorch's attention, document by document.

    torchrun ... pretrain_gpt.py ... --transformer-impl local \\
        --spec benchmarks.train.fp32_spec layer_spec       (without --bf16, at CP 1)

It shares nothing with the package: no plan, no kernel, no dispatch. TF32 is refused.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class DocumentSdpa(MegatronModule):  # type: ignore[misc]
    """Megatron's core-attention protocol over one call of SDPA for each document."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config=config)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any,
        packed_seq_params: Any = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Causal attention inside each document of one stream.

        Args:
            query: fp32 [rows, heads, d], or with a batch of one behind the rows; key and value with
                fewer heads.
            packed_seq_params: with cu_seqlens_q; None means one document.

        Raises:
            TypeError: another dtype than fp32, or TF32 products.
        """
        _check_fp32(query)
        q, k, v = (
            x.reshape(x.shape[0], *x.shape[-2:]).transpose(0, 1) for x in (query, key, value)
        )
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
        bounds = [0, q.shape[1]]
        if packed_seq_params is not None:
            bounds = sorted({*packed_seq_params.cu_seqlens_q.tolist(), q.shape[1]})
        parts = [
            scaled_dot_product_attention(
                *(x[None, :, start:end] for x in (q, k, v)), is_causal=True
            )[0]
            for start, end in pairwise(bounds)
        ]
        out = torch.cat(parts, dim=1).transpose(0, 1)
        return out.reshape(*query.shape[:-2], -1)


def _check_fp32(query: Tensor) -> None:
    if query.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32:
        raise TypeError(
            f"gradients are compared with fp32, got {query.dtype} and TF32 products "
            f"{torch.backends.cuda.matmul.allow_tf32}; leave --bf16 out, and TF32 off"
        )


def with_core(layer: Any, core: type) -> Any:
    """A layer spec whose self-attention has this class as its core attention."""
    attention = layer.submodules.self_attention
    inside = dataclasses.replace(attention.submodules, core_attention=core)
    attention = dataclasses.replace(attention, submodules=inside)
    return dataclasses.replace(
        layer, submodules=dataclasses.replace(layer.submodules, self_attention=attention)
    )


layer_spec = with_core(get_gpt_layer_local_spec(normalization="RMSNorm"), DocumentSdpa)
