"""The selective scan of Mamba-2, token by token; a new document starts from an empty state."""

from __future__ import annotations

from typing import Any

import torch
from causal_conv1d import causal_conv1d_fn
from torch import Tensor


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor, seq_idx: Tensor | None
) -> Tensor:
    """x [b, l, heads, p], dt [b, l, heads], A and D [heads], B and C [b, l, groups, n]."""
    batch, length, heads, width = x.shape
    B, C = (y.repeat_interleave(heads // y.shape[2], dim=2) for y in (B, C))
    decay, inputs = torch.exp(dt * A), (x * dt[..., None])[..., None] * B[..., None, :]
    state = x.new_zeros(batch, heads, width, B.shape[-1])
    rows = []
    for t in range(length):
        if seq_idx is not None and t and bool((seq_idx[:, t] != seq_idx[:, t - 1]).any()):
            state = torch.zeros_like(state)
        state = state * decay[:, t, :, None, None] + inputs[:, t]
        rows.append((state * C[:, t, :, None]).sum(-1))
    return torch.stack(rows, dim=1) + x * D[:, None]


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    *,
    D: Tensor,
    headdim: int,
    ngroups: int,
    seq_idx: Tensor | None = None,
    activation: str = "silu",
    **unused: Any,
) -> Tensor:
    """[b, l, z x B C dt] -> [b, l, heads * headdim]."""
    heads = len(A)
    inner, last = heads * headdim, zxbcdt.shape[-1]
    z, xBC, dt = zxbcdt.split([inner, last - inner - heads, heads], dim=-1)
    xBC = causal_conv1d_fn(xBC.mT, conv1d_weight, conv1d_bias, seq_idx, activation).mT
    n = (xBC.shape[-1] - inner) // 2
    x, B, C = xBC.split([inner, n, n], dim=-1)
    parts = (x.unflatten(-1, (heads, headdim)), *(y.unflatten(-1, (ngroups, -1)) for y in (B, C)))
    steps = torch.nn.functional.softplus(dt + dt_bias)
    out = mamba_chunk_scan_combined(parts[0], steps, A, *parts[1:], D=D, seq_idx=seq_idx)
    return out.flatten(-2) * torch.nn.functional.silu(z)
