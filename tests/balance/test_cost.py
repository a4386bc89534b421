"""Costs of samples are the tiles that their masks have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.balance import CostShape, sample_cost
from megatron_magi.balance.cost import TILE, causal_tiles

LENGTHS = st.lists(st.integers(1, 6 * TILE), min_size=1, max_size=3)


def counted(length: int, window: int | None) -> int:
    """Tiles of one document with at least one pair, as a dense mask has them."""
    rows, keys = np.arange(length)[:, None], np.arange(length)[None]
    seen = (keys <= rows) & (keys >= rows - (length if window is None else window))
    tiles = -(-length // TILE)
    padded = np.pad(seen, (0, tiles * TILE - length))
    return int(padded.reshape(tiles, TILE, tiles, TILE).any(axis=(1, 3)).sum())


@given(LENGTHS)
def test_tiles_of_causal_documents(lengths: list[int]) -> None:
    assert causal_tiles(np.array(lengths)) == sum(counted(n, None) for n in lengths)


@given(LENGTHS, st.integers(0, 4 * TILE))
def test_tiles_of_windows(lengths: list[int], window: int) -> None:
    assert causal_tiles(np.array(lengths), window) == sum(counted(n, window) for n in lengths)


def test_layers_with_and_without_a_window_add_up() -> None:
    lengths = np.array([5 * TILE, 10], np.int64)
    shape = CostShape(7, 3, full_layers=2, window_layers=4, window=TILE)
    tiles = 2 * causal_tiles(lengths) + 4 * causal_tiles(lengths, TILE)
    assert sample_cost(lengths, shape) == 7 * tiles + 3 * (5 * TILE + 10)


@pytest.mark.parametrize("length", [1, TILE, TILE + 1])
def test_a_window_of_all_is_none(length: int) -> None:
    lengths = np.array([length])
    assert causal_tiles(lengths, length) == causal_tiles(lengths)
