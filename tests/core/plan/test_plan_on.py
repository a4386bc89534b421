"""Plans whose queries and keys have homes of their own, against the dense mask."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import CostTable, HeadShape, MagiConfig
from megatron_magi.core.plan import AttnPlan, TokenLayout, make_attn_plan
from tests.core.runtime.cross_jobs import random_layout
from tests.dense import random_mask

FEW_KEY_HEADS = HeadShape(64, 8, 128)
AS_MANY_KEY_HEADS = HeadShape(16, 16, 128)


def owners(layout: TokenLayout) -> np.ndarray:
    return np.repeat(layout.chunk_ranks, layout.chunk_size)[: layout.total_seqlen]


def received(transfers: np.ndarray, home: np.ndarray, size: int) -> np.ndarray:
    """int [size, rows]: how often each rank receives each row; all come from their owners."""
    counts = np.zeros((size, len(home)), int)
    for _, dst, src, start, end in transfers.tolist():
        assert (home[start:end] == src).all() and dst != src and start < end
        counts[dst, start:end] += 1
    return counts


def check_no_row_twice(plan: AttnPlan, dense: np.ndarray) -> np.ndarray:
    """Every cell is computed on one rank, and every row is sent to the ranks that need it, once.

    Returns:
        bool [num_q, num_k]: the cells that are computed where the keys are.
    """
    of_q, of_k = owners(plan.layout), owners(plan.key_layout)
    keys = received(plan.transfers, of_k, plan.cp_size)
    queries = received(plan.query_transfers, of_q, plan.cp_size)
    pairs = np.zeros((plan.cp_size, plan.cp_size), bool)
    pairs[plan.query_transfers[:, 2], plan.query_transfers[:, 1]] = True
    moved = dense & pairs[of_q][:, of_k]
    stays = dense & ~moved
    for rank in range(plan.cp_size):
        needs_keys = stays[of_q == rank].any(0) & (of_k != rank)
        assert np.array_equal(keys[rank], needs_keys.astype(int)), "keys"
        needs_queries = moved[:, of_k == rank].any(1)
        assert np.array_equal(queries[rank], needs_queries.astype(int)), "queries"
    return moved


def check_slices(plan: AttnPlan, dense: np.ndarray, moved: np.ndarray) -> None:
    """The slices of all ranks, in global rows, are the mask; those of queries the moved cells."""
    seen = np.zeros(dense.shape, int)
    for rank in range(plan.cp_size):
        view = plan.rank_plan(rank)
        q_rows, k_rows = (layout.position_ids(rank) for layout in plan.homes)
        for stage in view.forward_stages:
            buffer = [k_rows]
            if stage.cast is not None:
                own, arrived = stage.cast.own_ranges.tolist(), stage.cast.recv_ranges.tolist()
                buffer = [k_rows[a:b] for a, b in own] + [np.arange(a, b) for a, b in arrived]
            add_cells(seen, stage.slices, q_rows, np.concatenate([k_rows[:0], *buffer]))
        if view.queries is None:
            assert not moved.any()
            continue
        arrived = view.queries.cast.recv_ranges.tolist()
        buffer = np.concatenate([q_rows[:0], *(np.arange(a, b) for a, b in arrived)])
        mine = np.zeros(dense.shape, int)
        add_cells(mine, view.queries.slices, buffer, k_rows)
        assert np.array_equal(mine[:, owners(plan.key_layout) == rank],
                              moved[:, owners(plan.key_layout) == rank].astype(int))  # fmt: skip
        seen += mine
    assert np.array_equal(seen, dense.astype(int))


def add_cells(seen: np.ndarray, slices: np.ndarray, queries: np.ndarray, keys: np.ndarray) -> None:
    for q0, q1, k0, k1, lo, hi in slices.tolist():
        d = np.arange(k0, k1) - np.arange(q0, q1)[:, None]
        seen[np.ix_(queries[q0:q1], keys[k0:k1])] += (lo <= d) & (d <= hi)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_q=st.integers(1, 50),
    num_k=st.integers(1, 90),
    cp_size=st.integers(1, 6),
    sends=st.sampled_from([None, True, False]),
    mode=st.sampled_from(["at_once", "local_first", "staged", None]),
    has_nodes=st.booleans(),
)
def test_any_mask_on_any_layouts(
    seed: int, num_q: int, num_k: int, cp_size: int, sends: bool | None, mode: str | None,
    has_nodes: bool,
) -> None:  # fmt: skip
    mask = random_mask(seed, num_q, num_k)
    given = {}
    if seed % 2:
        given["layout"] = random_layout(seed, num_q, cp_size)
    if seed % 3:
        given["key_layout"] = random_layout(seed + 1, num_k, cp_size)
    shape = AS_MANY_KEY_HEADS if seed % 5 else FEW_KEY_HEADS
    costs = CostTable(ranks_per_node=2 if has_nodes and cp_size % 2 == 0 else None)
    config = MagiConfig(send_queries=sends, forward_mode=mode, costs=costs)
    plan = make_attn_plan(mask, cp_size, shape, config, **given)
    dense = mask.to_dense()
    moved = check_no_row_twice(plan, dense)
    check_slices(plan, dense, moved)
    if sends is False:
        assert not moved.any()
