"""Queries that are sent to the ranks that have their keys: between which ranks, and what they do.

A block of nq queries and nk keys on two ranks can be computed on either. The rank of the queries
needs the keys, and returns their gradients; the rank of the keys needs the queries, and returns
their outputs, which are merged at home. ``HeadShape`` has the bytes of both rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_magi.config import MagiConfig
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.native import solver
from megatron_magi.core.plan.group_cast_plan import cast_of
from megatron_magi.core.plan.head_shape import HeadShape
from megatron_magi.core.plan.peer_rows import rows_between
from megatron_magi.core.plan.rank_plan import QueryStage, RankPlan
from megatron_magi.core.plan.token_layout import Homes, Int32Array, Int64Array, ranks_per_node

MOST_LOAD = 1.05
"""The highest load over the mean that sending queries may lead to, unless it was higher before."""

Pairs = npt.NDArray[np.bool_]
"""bool [cp_size, cp_size]: by the rank of the queries and the rank of the keys."""


def with_queries(
    view: RankPlan, mask: AttnMask, homes: Homes, query_transfers: Int32Array
) -> RankPlan:
    """The rank's view with the queries that it sends and receives, if any rank sends some."""
    if len(query_transfers) == 0:
        return view
    cast = cast_of(homes.queries, query_transfers, view.rank)
    slices = solver.buffer_slices(mask.slices, cast.recv_ranges, homes.keys.local_ranges(view.rank))
    slices.setflags(write=False)
    return replace(view, queries=QueryStage(slices, cast))


def transfers_of_queries(mask: AttnMask, homes: Homes, pairs: Pairs | None = None) -> Int32Array:
    """int32 [M, 5]: the queries that every rank of keys needs, each once; stage 0.

    Args:
        pairs: those between which queries are sent; None: all.
    """
    q_start, q_end, k_start, k_end, d_lo, d_hi = mask.slices.T.astype(np.int64)
    mirrored = np.stack([k_start, k_end, q_start, q_end, -d_hi, -d_lo], 1).astype(np.int32)
    _, _, transfers, _ = homes.keys.native.solve_transfers(
        solver.canonical_slices(mirrored), tile_q=1, tile_k=1, degree=0, forward=0,
        costs=_NO_COSTS, keys=homes.queries.native,
    )  # fmt: skip
    if pairs is None:
        return transfers
    return np.ascontiguousarray(transfers[pairs[transfers[:, 2], transfers[:, 1]]])


_NO_COSTS = solver.StageCosts(
    row_ps=0, grad_row_ps=0, tile_ps=0, exchange_ps=0, call_ps=0, pass_ps=0
)


def choose_pairs(
    mask: AttnMask,
    homes: Homes,
    key_transfers: Int32Array,
    head_shape: HeadShape,
    config: MagiConfig,
) -> Pairs:
    """The pairs of ranks between which queries are sent because that takes fewer bytes.

    A relay attends on all keys that it relays, so it sends no queries to their owner. Pairs are
    taken back as long as that lowers the highest load; if it is still above MOST_LOAD and higher
    than without sent queries, there are none.

    Args:
        key_transfers: those of keys alone.
    """
    size = homes.queries.cp_size
    keys = rows_between(key_transfers, size).T
    queries = rows_between(transfers_of_queries(mask, homes), size)
    saved = keys * key_row_bytes(head_shape, config) - queries * head_shape.query_row_bytes
    areas = homes.queries.native.pair_areas(mask.slices, homes.keys.native)
    pairs: Pairs = (saved > 0) & ~np.eye(size, dtype=bool)
    relays = _relays(size, ranks_per_node(config, size))
    receives = (keys > 0) & ~pairs
    pairs[relays[receives], np.nonzero(receives)[1]] = False
    most = max(int(areas.sum(1).max()), int(areas.sum() / size * MOST_LOAD))
    loads = moved_loads(areas, pairs)
    while pairs.any():
        taken = _least_missed(loads, areas, pairs, saved)
        if taken is None:
            break
        query_rank, key_rank = taken
        back = loads.copy()
        back[query_rank] += areas[taken]
        back[key_rank] -= areas[taken]
        if back.max() >= loads.max() and loads.max() <= most:
            break
        pairs[taken], loads = False, back
        relay = int(relays[taken])
        if pairs[relay, key_rank]:
            pairs[relay, key_rank] = False
            loads = moved_loads(areas, pairs)
    return pairs if loads.max() <= most else np.zeros_like(pairs)


def _relays(size: int, per_node: int) -> Int64Array:
    """[query rank, key rank]: the rank that receives the keys for the node of the query rank; see
    csrc/planner/nodes.h. With ``per_node`` 0 the query rank itself."""
    ranks = np.arange(size)
    if per_node == 0:
        return np.broadcast_to(ranks[:, None], (size, size))
    return ranks[:, None] // per_node * per_node + ranks % per_node


def _least_missed(
    loads: Int64Array, areas: Int64Array, pairs: Pairs, saved: Int64Array
) -> tuple[int, int] | None:
    """The pair to take back from the fullest rank: the one that leaves its two ranks with the least
    load, and of equals the one that saves the fewest bytes for a cell. None: nothing arrives there.
    """
    fullest = int(loads.argmax())
    arriving = np.flatnonzero(pairs[:, fullest])
    if len(arriving) == 0:
        return None
    cells = areas[arriving, fullest]
    fuller = np.maximum(loads[arriving] + cells, loads[fullest] - cells)
    order = np.lexsort((saved[arriving, fullest] / cells, fuller))
    return int(arriving[order[0]]), fullest


def key_row_bytes(head_shape: HeadShape, config: MagiConfig) -> int:
    """Bytes of a key and its value that another rank reads, forward and backward: sent once or
    twice, and their gradients return."""
    times = 1 if config.keep_received_keys else 2
    grad = 4 if config.dkv_reduce_in_fp32 else head_shape.bytes_per_element
    return times * head_shape.kv_row_bytes + head_shape.kv_row_elements * grad


def moved_loads(areas: Int64Array, pairs: Pairs) -> Int64Array:
    """[cp_size]: each rank's cells, where those of ``pairs`` are computed with the keys.

    Args:
        areas: int64 [cp_size, cp_size], cells by the ranks of queries and keys.
    """
    moved = np.where(pairs, areas, 0)
    loads: Int64Array = areas.sum(1) - moved.sum(1) + moved.sum(0)
    return loads
