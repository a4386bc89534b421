"""The cost of a sample in closed form, from the lengths of its documents.

It counts kernel tiles of causal documents, as the planner does, without making a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_magi.balance.deal import Int64Array

TILE = 128
"""Rows and columns of a tile of attention."""


@dataclass(frozen=True)
class CostShape:
    """Costs of a model's layers, forward and backward; integers in a unit of the caller's."""

    tile_cost: int
    """Of one tile of attention in one layer."""
    token_cost: int
    """Of one token's other products in all layers."""
    full_layers: int
    """Layers whose documents are causal."""
    window_layers: int = 0
    """Layers whose rows see `window` tokens before their own."""
    window: int = 0


def sample_cost(lengths: Int64Array, shape: CostShape) -> int:
    """Cost of a sample of causal documents.

    Args:
        lengths: int64 [documents], tokens of each.
    """
    tiles = shape.full_layers * causal_tiles(lengths)
    if shape.window_layers:
        tiles += shape.window_layers * causal_tiles(lengths, shape.window)
    return shape.tile_cost * tiles + shape.token_cost * int(lengths.sum())


def causal_tiles(lengths: Int64Array, window: int | None = None) -> int:
    """Tiles of causal documents, each of which begins at a tile.

    Args:
        window: tokens before its own that a row sees; None: all.
    """
    rows = -(-lengths // TILE)
    if window is None:
        return int((rows * (rows + 1) // 2).sum())
    width = -(-window // TILE) + 1  # tiles of a row far from its document's beginning
    begun = np.minimum(rows, width)
    return int((begun * (begun + 1) // 2 + (rows - begun) * width).sum())
