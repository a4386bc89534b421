"""The gated delta product: several delta rules behind one decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.documents import seq_idx_of


def chunk_gated_delta_product(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    num_householder: int,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """q [b, l, heads, n] and g [b, l, heads]; k, v and beta have num_householder rows for each."""
    documents = seq_idx_of(cu_seqlens, q.shape[1])
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])
    rows = []
    for t in range(q.shape[1]):
        if documents is not None and t and documents[0, t] != documents[0, t - 1]:
            state = torch.zeros_like(state)
        state = state * g[:, t, :, None, None].exp()
        for i in range(t * num_householder, (t + 1) * num_householder):
            key = k[:, i, :, :, None]
            change = beta[:, i, :, None] * (v[:, i] - (state * key).sum(-2))
            state = state + key * change[..., None, :]
        rows.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(rows, dim=1) * q.shape[-1] ** -0.5, None
