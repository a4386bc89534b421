"""Plans of plain batches: Megatron's own rows, each sequence causal, the same plan in every call.

CUDA graphs that hold attention need that, because a replay repeats the plan that was captured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_magi.adapter.model_shape import head_shape
from megatron_magi.config import MagiConfig
from megatron_magi.core.mask import builders
from megatron_magi.core.plan import AttnPlan, TokenLayout
from megatron_magi.core.runtime.plan_cache import plan_for


def plain_plan(
    rows: int, count: int, has_window: bool, model_config: Any, config: MagiConfig
) -> AttnPlan:
    """The plan of a plain batch, whose rows stay as they are: no chunk size may pad them.

    Args:
        rows: of one sequence on a rank, the first size of Megatron's tensors.
        count: of sequences, the second one.
        has_window: whether the layer attends in the model's window.

    Raises:
        ValueError: with context parallelism, rows that are not two pieces of one length, or the
            transport "symm_mem", which numbers its exchanges: a replay cannot repeat one.
    """
    cp_size = model_config.context_parallel_size
    mask = builders.from_cu_seqlens(np.arange(count + 1) * rows * cp_size)
    if has_window:
        mask = builders.within_window(mask, tuple(model_config.window_size))
    config = replace(config, chunk_size=None)
    layout = None
    if cp_size > 1:
        if config.transport == "symm_mem":
            raise ValueError(
                "CUDA graphs that hold attention under context parallelism require transport "
                "'all_to_all', got 'symm_mem'; set it, or leave it out"
            )
        config = replace(config, transport="all_to_all")
        layout = mirrored_layout(rows, count, cp_size)
    return plan_for(mask, cp_size, head_shape(model_config), config, layout=layout)


@lru_cache(maxsize=16)
def mirrored_layout(rows: int, count: int, cp_size: int) -> TokenLayout:
    """Megatron's layout: a rank has the pieces r and 2 * cp_size - 1 - r of each sequence.

    Args:
        rows: of one sequence on a rank.
        count: of sequences.

    Raises:
        ValueError: an odd number of rows.
    """
    if rows % 2:
        raise ValueError(
            f"a plain batch under context parallelism requires two pieces of each sequence on "
            f"every rank, got {rows} rows; use a length that 2 * {cp_size} divides"
        )
    ranks = np.arange(cp_size, dtype=np.int32)
    owners = np.tile(np.concatenate([ranks, ranks[::-1]]), count)
    return TokenLayout(rows * cp_size * count, rows // 2, cp_size, owners)
