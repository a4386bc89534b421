"""Homes of keys that are not the queries' tokens."""

from __future__ import annotations

from megatron_magi import AttnMask, MagiConfig
from megatron_magi.core.plan import contiguous_layout, make_attn_plan
from tests.core.plan.test_plan_on import FEW_KEY_HEADS


def test_a_key_goes_to_the_rank_that_reads_it() -> None:
    mask = AttnMask([[0, 8, 24, 48, -99, 99], [8, 16, 0, 24, -99, 99]], 16, 48)
    layout = contiguous_layout(16, 2, MagiConfig())
    plan = make_attn_plan(mask, 2, FEW_KEY_HEADS, MagiConfig(), layout=layout)
    assert plan.rows_received.tolist() == [0, 0]
