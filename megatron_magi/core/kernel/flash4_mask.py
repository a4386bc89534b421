"""Slices as FlashAttention-4's mask: a function that tests a cell, and lists of blocks.

T query rows, R intervals of keys that a row sees (flex_block_mask.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_magi.core.kernel.flex_block_mask import (
    BLOCK,
    Blocks,
    block_kinds,
    block_lists,
    key_intervals,
    power_of_two,
    strips_of,
)
from megatron_magi.core.kernel.slice_table import SliceTable

BLOCK_Q = 2 * BLOCK
"""Query rows of a block: on Blackwell two tiles of 128 are in flight, and elsewhere a block of two
tiles is taken too, so that every GPU runs on the same lists."""


class Flash4Mask(NamedTuple):
    """A table in the form that FlashAttention-4 takes."""

    visible: Callable[..., Any]
    """Its ``mask_mod``."""
    intervals: list[Tensor]
    """The begins and the ends of a row's intervals of keys, int32 [R, T rounded up to blocks]."""
    forward: Any
    """BlockSparseTensorsTorch: for every block of queries, the blocks of keys that it sees."""
    backward: Any
    """The same for every block of keys."""


def flash4_mask(table: SliceTable, device: torch.device, least_intervals: int) -> Flash4Mask:
    """The mask of a table, built once per device.

    Args:
        least_intervals: the least number of intervals that the test of a cell compares, so that
            tables of different numbers of slices a row share one compiled kernel.
    """
    make = partial(_make_mask, table, device, least_intervals)
    return table.cached(("fa4 mask", device, least_intervals), make)


def _make_mask(table: SliceTable, device: torch.device, least_intervals: int) -> Flash4Mask:
    # Imported here: it needs the package.
    from megatron_magi.core.kernel.fa4_mask_mod import visible_cells

    strips = strips_of(table)
    num_intervals = power_of_two(max(strips.most, least_intervals))
    rows = -(-table.num_q // BLOCK_Q) * BLOCK_Q
    intervals = key_intervals(strips, num_intervals, rows)
    partial, full = block_kinds(table, BLOCK_Q)
    return Flash4Mask(
        visible_cells(num_intervals),
        [torch.from_numpy(x).to(device) for x in intervals],
        _sparse_tensors(partial, full, device),
        _sparse_tensors(partial.T, full.T, device),
    )


def _sparse_tensors(partial: Blocks, full: Blocks, device: torch.device) -> Any:
    """BlockSparseTensorsTorch of the blocks in every row of these tables."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    # Lists end with the longest row: all blocks of a long sequence would take hundreds of MB.
    lists = [
        x
        for blocks in (partial, full)
        for x in block_lists(blocks, device, max(int(blocks.sum(1).max(initial=0)), 1))
    ]
    return BlockSparseTensorsTorch(*lists, block_size=(BLOCK_Q, BLOCK))
