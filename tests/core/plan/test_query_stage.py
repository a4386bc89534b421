"""Queries that are sent to their keys: where that takes fewer bytes and overloads no rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import AttnMask, MagiConfig, masks
from megatron_magi.core.plan import AttnPlan, contiguous_layout, make_attn_plan
from megatron_magi.core.plan.query_stage import MOST_LOAD, key_row_bytes
from tests.core.plan.test_plan_on import (
    AS_MANY_KEY_HEADS,
    FEW_KEY_HEADS,
    check_no_row_twice,
    owners,
)
from tests.core.runtime.cross_jobs import random_layout
from tests.dense import random_mask


def bytes_sent(plan: AttnPlan) -> int:
    """Forward and backward, of all ranks."""
    rows = [int((x[:, 4] - x[:, 3]).sum()) for x in (plan.transfers, plan.query_transfers)]
    shape = plan.head_shape
    return rows[0] * key_row_bytes(shape, plan.config) + rows[1] * shape.query_row_bytes


@pytest.mark.parametrize("cp_size", [4, 8])
def test_few_queries_go_to_many_keys(cp_size: int) -> None:
    mask = AttnMask([[0, 2048, 0, 131072, -(2**31), 2**31 - 1]], 2048, 131072)
    plans = [
        make_attn_plan(mask, cp_size, FEW_KEY_HEADS, MagiConfig(send_queries=sends))
        for sends in (None, False)
    ]
    assert bytes_sent(plans[0]) < 0.12 * bytes_sent(plans[1])
    assert len(plans[0].transfers) == 0 and plans[0].imbalance == 1.0


def test_long_queries_stay_with_short_texts() -> None:
    mask = AttnMask([[0, 65536, 0, 512, -(2**31), 2**31 - 1]], 65536, 512)
    plan = make_attn_plan(mask, 4, FEW_KEY_HEADS, MagiConfig())
    assert len(plan.query_transfers) == 0 and plan.rows_received.tolist() == [384] * 4


def test_causal_attention_with_few_key_heads_gains_nothing() -> None:
    mask = masks.causal(32768)
    plans = [
        make_attn_plan(mask, 4, FEW_KEY_HEADS, MagiConfig(send_queries=sends))
        for sends in (True, None)
    ]
    assert bytes_sent(plans[0]) == bytes_sent(plans[1])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), cp_size=st.integers(2, 5))
def test_sending_queries_overloads_no_rank(seed: int, cp_size: int) -> None:
    mask = random_mask(seed, 40, 90)
    home = random_layout(seed, 40, cp_size), random_layout(seed + 1, 90, cp_size)
    plan = make_attn_plan(
        mask, cp_size, AS_MANY_KEY_HEADS, MagiConfig(), layout=home[0], key_layout=home[1]
    )
    moved = check_no_row_twice(plan, mask.to_dense())
    of_q, of_k = owners(home[0]), owners(home[1])
    dense = mask.to_dense()
    before = np.array([dense[of_q == r].sum() for r in range(cp_size)])
    after = before + [moved[:, of_k == r].sum() - moved[of_q == r].sum() for r in range(cp_size)]
    assert after.sum() == mask.area()
    assert after.max() <= max(before.max(), mask.area() / cp_size * MOST_LOAD)


def test_contiguous_homes_of_many_key_heads_send_both() -> None:
    """Where nothing may be dealt out, late queries are computed where early keys lie."""
    mask = masks.causal(32768)
    layout = contiguous_layout(32768, 4, MagiConfig())
    plans = [
        make_attn_plan(mask, 4, AS_MANY_KEY_HEADS, MagiConfig(send_queries=sends), layout=layout)
        for sends in (True, None)
    ]
    assert bytes_sent(plans[0]) < bytes_sent(plans[1])
    assert plans[0].imbalance < plans[1].imbalance


def test_homes_are_part_of_the_digest() -> None:
    mask = masks.full(64)
    layouts = [random_layout(seed, 64, 2) for seed in (1, 2)]
    plans = [make_attn_plan(mask, 2, FEW_KEY_HEADS, MagiConfig())]
    plans += [
        make_attn_plan(mask, 2, FEW_KEY_HEADS, MagiConfig(), layout=plans[0].layout, key_layout=x)
        for x in layouts
    ]
    assert len({plan.digest for plan in plans}) == 3
    assert "key layout" in plans[1].field_digests
