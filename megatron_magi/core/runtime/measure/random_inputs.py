"""Random tensors to measure with."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.core.plan import HeadShape

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""Dtypes by their bytes per element."""


def random_qkv(
    head_shape: HeadShape, tokens: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """q [tokens, H, D], k [tokens, G, D] and v [tokens, G, E], normally distributed, in the dtype
    that has the shape's bytes per element: bf16, fp32 or fp64 (fp32 for any other number)."""
    heads_q, heads_kv = head_shape.num_heads_q, head_shape.num_heads_kv
    dtype = DTYPES.get(head_shape.bytes_per_element, torch.float32)
    q, k, v = (
        torch.randn(tokens, heads, width, dtype=dtype, device=device)
        for heads, width in (
            (heads_q, head_shape.head_dim),
            (heads_kv, head_shape.head_dim),
            (heads_kv, head_shape.value_dim),
        )
    )
    return q, k, v
