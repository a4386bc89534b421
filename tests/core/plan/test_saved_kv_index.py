"""Where a backward finds kept rows: the place holds the rows that its stage would receive."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import HeadShape
from megatron_magi.core.mask.row_ranges import rows_of
from megatron_magi.core.plan import RankPlan, StagePlan, make_attn_plan
from megatron_magi.core.plan.saved_kv_index import saved_kv_index
from tests.dense import random_mask
from tests.knobs import magi_config

HEADS = HeadShape(8, 2, 64)


@given(
    seed=st.integers(0, 2**31 - 1),
    total=st.integers(1, 130),
    nodes=st.integers(1, 3),
    per_node=st.integers(2, 4),
    degree=st.sampled_from([None, 0, 1, 2, 3]),
    mode=st.sampled_from([None, "at_once", "local_first", "staged"]),
)
@settings(max_examples=150, deadline=None)
def test_any_mask(seed, total, nodes, per_node, degree, mode):
    config = magi_config(
        tile_q=8, tile_k=8, overlap_degree=degree, forward_mode=mode,
        ranks_per_node=per_node if nodes > 1 else None,
    )  # fmt: skip
    plan = make_attn_plan(random_mask(seed, total, total), nodes * per_node, HEADS, config)
    for rank in range(plan.cp_size):
        check(plan.rank_plan(rank))


def check(view: RankPlan) -> None:
    buffers = [global_rows(view, stage) for stage in view.forward_stages if stage.cast is not None]
    places = saved_kv_index(view)
    assert list(places) == [stage for stage in view.stages if stage.cast is not None]
    for stage, place in places.items():
        buffer, wanted = buffers[place.buffer], global_rows(view, stage)
        if place.index is None:
            found = buffer[place.start : place.start + place.num_rows]
        else:
            assert place.index.dtype == np.int32 and not place.index.flags.writeable
            found = np.concatenate([wanted[: stage.num_own], buffer[place.index]])
        assert np.array_equal(found, wanted)


def global_rows(view: RankPlan, stage: StagePlan) -> np.ndarray:
    """The rows of a stage's key buffer; own ones by their local numbers, below zero."""
    return np.concatenate([-1 - rows_of(stage.cast.own_ranges), rows_of(stage.cast.recv_ranges)])


def test_one_remote_stage_is_read_where_it_lies():
    """Then no row is copied, whatever the mode of the forward."""
    for mode in ("at_once", "local_first", "staged"):
        config = magi_config(tile_q=8, tile_k=8, overlap_degree=1, forward_mode=mode)
        plan = make_attn_plan(random_mask(3, 120, 120), 3, HEADS, config)
        assert len(plan.transfers)
        for rank in range(3):
            assert all(
                place.index is None for place in saved_kv_index(plan.rank_plan(rank)).values()
            )
