"""A plan as a value: its pickle, its digest, and the ranks that it has."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from megatron_magi.core.plan import HeadShape, make_attn_plan
from tests.core.plan.test_make_plan import HEADS, packed_causal, window
from tests.knobs import magi_config


def test_pickle_is_small_and_equal():
    plan = make_attn_plan(packed_causal(*[500] * 120), 8, HEADS, magi_config())
    size = len(pickle.dumps(plan))
    for rank in range(8):
        plan.rank_plan(rank)
    blob = pickle.dumps(plan)
    assert len(blob) == size < 24 * len(plan.mask.slices) + 20 * len(plan.transfers) + 16_000
    copy = pickle.loads(blob)
    assert copy == plan and hash(copy) == hash(plan) and copy.field_digests == plan.field_digests
    assert copy.layout == plan.layout and np.array_equal(copy.transfers, plan.transfers)
    ours, theirs = plan.rank_plan(3).stages, copy.rank_plan(3).stages
    assert all(np.array_equal(a.slices, b.slices) for a, b in zip(ours, theirs, strict=True))
    for table in (copy.transfers, copy.loads):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 0


def test_digest_names_the_field_that_differs():
    mask, config = packed_causal(100, 28), magi_config(chunk_size=16)
    base = make_attn_plan(mask, 4, HEADS, config)
    assert base == make_attn_plan(packed_causal(100, 28), 4, HEADS, config)
    others = {
        "mask": make_attn_plan(window(128, 128), 4, HEADS, config, layout=base.layout),
        "head_shape": make_attn_plan(mask, 4, HeadShape(8, 4, 64), config, layout=base.layout),
        "config": make_attn_plan(
            mask, 4, HEADS, replace(config, deterministic=True), layout=base.layout
        ),
        "token layout": make_attn_plan(
            mask,
            4,
            HEADS,
            config,
            layout=replace(base.layout, chunk_ranks=base.layout.chunk_ranks[::-1].copy()),
        ),
    }
    for field, other in others.items():
        differ = {f for f in base.field_digests if base.field_digests[f] != other.field_digests[f]}
        assert differ == {field}
        assert other != base


def test_another_planner_version_is_another_plan(monkeypatch):
    """Ranks with other versions of the package may plan differently from the same input."""
    made = [make_attn_plan(packed_causal(100, 28), 4, HEADS, magi_config())]
    monkeypatch.setattr("megatron_magi.core.plan.attn_plan.PLANNER_VERSION", 10**6)
    made.append(make_attn_plan(packed_causal(100, 28), 4, HEADS, magi_config()))
    assert made[0].field_digests == made[1].field_digests
    assert made[0].digest != made[1].digest and made[0] != made[1]


def test_owners_and_heads_that_do_not_divide_are_refused():
    plan = make_attn_plan(packed_causal(128), 4, HEADS, magi_config())
    with pytest.raises(ValueError, match="every rank must own the same number of chunks"):
        replace(plan.layout, chunk_ranks=np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="num_heads_q must be a multiple of num_heads_kv"):
        HeadShape(8, 3, 64)
