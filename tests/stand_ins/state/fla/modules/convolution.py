"""Short causal convolutions over documents."""

from __future__ import annotations

from typing import Any

from causal_conv1d import causal_conv1d_fn
from torch import Tensor

from fla.documents import seq_idx_of


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """[batch, length, channels] -> the same, and no state."""
    documents = seq_idx_of(cu_seqlens, x.shape[1])
    return causal_conv1d_fn(x.mT, weight, bias, documents, activation).mT, None
