"""Short causal convolutions that restart in every document, tap by tap in torch."""

from __future__ import annotations

import torch
from torch import Tensor

__version__ = "1.4.0"


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """[batch, channels, length] -> the same; weight [channels, taps], seq_idx [batch, length]."""
    out = torch.zeros_like(x) if bias is None else bias[:, None].expand_as(x)
    length = x.shape[-1]
    for back in range(min(weight.shape[1], length)):
        shifted = torch.nn.functional.pad(x[..., : length - back], (back, 0))
        if seq_idx is not None:
            then = torch.nn.functional.pad(seq_idx[:, : length - back], (back, 0), value=-1)
            shifted = shifted * (then == seq_idx)[:, None]
        out = out + weight[:, -1 - back, None] * shifted
    return torch.nn.functional.silu(out) if activation in ("silu", "swish") else out
