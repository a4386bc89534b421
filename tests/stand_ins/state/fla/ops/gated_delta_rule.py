"""The gated delta rule."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fla.ops.gated_delta_product import chunk_gated_delta_product


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **more: Any
) -> tuple[Tensor, None]:
    """q and k [b, l, heads, n], v [b, l, heads, p], g and beta [b, l, heads] -> like v."""
    return chunk_gated_delta_product(q=q, k=k, v=v, g=g, beta=beta, num_householder=1, **more)
