"""The gated delta rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.documents import seq_idx_of


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """q and k [b, l, heads, n], v [b, l, heads, p], g and beta [b, l, heads] -> like v."""
    documents = seq_idx_of(cu_seqlens, q.shape[1])
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])
    rows = []
    for t in range(q.shape[1]):
        if documents is not None and t and documents[0, t] != documents[0, t - 1]:
            state = torch.zeros_like(state)
        state = state * g[:, t, :, None, None].exp()
        seen = (state * k[:, t, :, :, None]).sum(-2)
        change = beta[:, t, :, None] * (v[:, t] - seen)
        state = state + k[:, t, :, :, None] * change[..., None, :]
        rows.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(rows, dim=1) * q.shape[-1] ** -0.5, None
