"""The widths of heads: those of a call, and those that the CUDA kernels are compiled for."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron_magi.core.native import solver


class HeadDims(NamedTuple):
    """Elements of a head; the two differ in multi-latent attention."""

    head_dim: int
    """The elements of one head of queries and keys."""
    value_dim: int
    """The elements of one head of values and outputs."""


COMPILED_WIDTHS = tuple(HeadDims(*widths) for widths in solver.compiled_widths())
"""The widths that the kernels are compiled for (csrc/attention/widths.h), cheapest first. A call
takes the first ones that hold its heads."""


def widths_of(q: Tensor, v: Tensor) -> HeadDims:
    return HeadDims(q.shape[-1], v.shape[-1])


def too_wide(widths: HeadDims) -> str:
    """Why no kernel takes these heads, and what to do."""
    most = COMPILED_WIDTHS[-1]
    return (
        f"the CUDA kernels take queries and keys of head_dim up to {most.head_dim} and values up "
        f"to {most.value_dim}, got {widths.head_dim} and {widths.value_dim}; use the backend 'flex'"
    )


def compiled_widths(widths: HeadDims) -> HeadDims | None:
    """The least compiled widths that hold these heads; None if they are too wide."""
    for compiled in COMPILED_WIDTHS:
        if widths.head_dim <= compiled.head_dim and widths.value_dim <= compiled.value_dim:
            return compiled
    return None
