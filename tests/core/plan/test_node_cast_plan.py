"""Plans among several nodes: what arrives is what is needed, and a row crosses to a node once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.core.native import solver
from megatron_magi.core.plan import (
    AttnPlan,
    GroupCastPlan,
    NodeCastPlan,
    make_attn_plan,
    make_shift_plan,
)
from tests.core.plan.plan_checks import check, check_casts
from tests.dense import random_mask
from tests.knobs import magi_config

HEADS = HeadShape(8, 2, 64)
DOCUMENTS = masks.from_cu_seqlens([0, 300, 340, 420, 900, 1000, 1020, 1536])


def config_of(ranks_per_node: int | None, **knobs: object) -> MagiConfig:
    return magi_config(tile_q=8, tile_k=8, ranks_per_node=ranks_per_node, **knobs)


@given(
    seed=st.integers(0, 2**31 - 1),
    total=st.integers(1, 130),
    nodes=st.integers(2, 4),
    per_node=st.integers(2, 4),
    degree=st.sampled_from([None, 0, 1, 2, 3]),
    mode=st.sampled_from([None, "at_once", "local_first", "staged"]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_mask(seed, total, nodes, per_node, degree, mode):
    config = config_of(per_node, overlap_degree=degree, forward_mode=mode)
    plan = make_attn_plan(random_mask(seed, total, total), nodes * per_node, HEADS, config)
    check(plan)
    assert plan.ranks_per_node == per_node
    check_crossings(plan)


def check_crossings(plan: AttnPlan) -> None:
    """Over all stages, each row crosses once to each node that reads it, counted cell by cell."""
    dense, per_node = plan.mask.to_dense(), plan.ranks_per_node
    layout = plan.layout
    owner = np.repeat(layout.chunk_ranks, layout.chunk_size)[: layout.total_seqlen]
    wanted = np.zeros((plan.cp_size // per_node, layout.total_seqlen), int)
    for node in range(len(wanted)):
        reads = dense[owner // per_node == node].any(axis=0)
        wanted[node] = reads & (owner // per_node != node)
    found = np.zeros_like(wanted)
    for stage in range(plan.num_stages):
        transfers = plan.transfers[plan.transfers[:, 0] == stage]
        for number, dst, src, start, end in solver.crossing_leg(transfers, per_node).tolist():
            assert number == stage and dst % per_node == src % per_node
            found[dst // per_node, start:end] += 1
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("mode", ["at_once", "local_first", "staged"])
def test_long_documents_in_stages(mode: str) -> None:
    plan = make_attn_plan(DOCUMENTS, 8, HEADS, config_of(4, overlap_degree=3, forward_mode=mode))
    check(plan)
    check_crossings(plan)
    casts = [stage.cast for rank in range(8) for stage in plan.rank_plan(rank).stages[1:]]
    assert all(isinstance(cast, NodeCastPlan) for cast in casts)
    assert any(cast.spreading.num_sent for cast in casts if cast is not None)


def test_stages_of_a_full_mask_are_of_equal_size() -> None:
    plan = make_attn_plan(masks.full(1024), 8, HEADS, config_of(4, overlap_degree=4))
    for rank in range(8):
        rows = [stage.cast.num_recv for stage in plan.rank_plan(rank).stages[1:]]
        assert sum(rows) == 1024 * 7 // 8 and max(rows) - min(rows) <= 32, rows


def test_one_stage_both_ways_shares_its_tables() -> None:
    plan = make_attn_plan(
        DOCUMENTS, 8, HEADS, config_of(4, overlap_degree=1, forward_mode="at_once")
    )
    view = plan.rank_plan(2)
    forward, backward = view.forward_stages[0].cast, view.stages[1].cast
    assert isinstance(forward, NodeCastPlan) and isinstance(backward, NodeCastPlan)
    assert forward.spreading is backward.spreading
    assert forward.first.send_ranges is backward.first.send_ranges
    assert forward.first.num_own == plan.layout.num_local_tokens
    assert backward.first.num_own == 0


def test_a_shift_stays_one_exchange() -> None:
    plan = make_attn_plan(DOCUMENTS, 8, HEADS, config_of(4))
    casts = [make_shift_plan(plan.layout, 1, rank).cast for rank in range(8)]
    assert all(isinstance(cast, GroupCastPlan) for cast in casts)
    check_casts(plan, casts)
