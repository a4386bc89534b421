"""The plan of a mask on given layouts: which rows are sent, as keys or as queries, and when."""

from __future__ import annotations

import numpy as np

from megatron_magi.config import MagiConfig
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.plan.attn_plan import FORWARD_MODES, AttnPlan, digests, no_transfers
from megatron_magi.core.plan.head_shape import HeadShape
from megatron_magi.core.plan.query_stage import (
    Pairs,
    choose_pairs,
    moved_loads,
    transfers_of_queries,
)
from megatron_magi.core.plan.stage_costs import stage_costs
from megatron_magi.core.plan.token_layout import Homes, Int32Array, Int64Array, ranks_per_node


def plan_on(
    homes: Homes, mask: AttnMask, head_shape: HeadShape, config: MagiConfig, *, is_cross: bool
) -> AttnPlan:
    """The plan of a mask on these layouts.

    Args:
        is_cross: cross-attention, whose two layouts may be equal; else they are the same one.

    Raises:
        ValueError: nodes with different numbers of ranks.
    """
    queries, keys = homes
    cross_layout = keys if is_cross else None
    query_transfers = no_transfers()
    degree, forward, transfers, loads = _transfers(homes, mask, head_shape, config)
    if config.send_queries or (config.send_queries is None and cross_layout is not None):
        pairs = choose_pairs(mask, homes, transfers, head_shape, config)
        if pairs.any():
            degree, forward, transfers, tiles = _transfers(homes, mask, head_shape, config, pairs)
            loads = _with_moved_tiles(tiles, mask, homes, pairs)
            query_transfers = transfers_of_queries(mask, homes, pairs)
    digest, of_fields = digests(mask, queries, head_shape, config, cross_layout)
    return AttnPlan(
        mask, queries, head_shape, config, degree, FORWARD_MODES[forward], transfers, loads,
        digest, of_fields, cross_layout, query_transfers,
    )  # fmt: skip


def _transfers(
    homes: Homes,
    mask: AttnMask,
    head_shape: HeadShape,
    config: MagiConfig,
    by_queries: Pairs | None = None,
) -> tuple[int, int, Int32Array, Int64Array]:
    """Overlap degree, number of the forward mode, transfers of keys, and tiles of each rank's
    queries.

    Args:
        by_queries: between which ranks no keys are sent; None: between all that need some.
    """
    queries, keys = homes
    return queries.native.solve_transfers(
        mask.slices,
        tile_q=config.costs.tile_q,
        tile_k=config.costs.tile_k,
        degree=-1 if config.overlap_degree is None else config.overlap_degree,
        forward=-1 if config.forward_mode is None else FORWARD_MODES.index(config.forward_mode),
        costs=stage_costs(head_shape, config, queries.num_local_tokens),
        ranks_per_node=ranks_per_node(config, queries.cp_size),
        keys=keys.native,
        by_queries=by_queries,
    )


def _with_moved_tiles(tiles: Int64Array, mask: AttnMask, homes: Homes, pairs: Pairs) -> Int64Array:
    """The tiles that each rank computes: cells that move count as tiles by the mask's average."""
    areas = homes.queries.native.pair_areas(mask.slices, homes.keys.native)
    moved = moved_loads(areas, pairs) - areas.sum(1)
    return np.maximum(0, tiles + moved * int(tiles.sum()) // max(1, int(areas.sum())))
