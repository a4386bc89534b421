"""A shift of the whole sequence, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_magi import HeadShape, masks
from megatron_magi.core.plan import make_attn_plan, make_shift_plan
from tests.core.plan.plan_checks import check_casts
from tests.knobs import magi_config

HEADS = HeadShape(4, 2, 8)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shift", [1, -1, 2, 40, -103, 205])
@pytest.mark.parametrize("total", [1, 90, 103])
def test_a_shift_equals_numpys_roll(cp_size, shift, total):
    plan = make_attn_plan(masks.causal(total), cp_size, HEADS, magi_config(tile_q=4, tile_k=4))
    d = plan.layout
    padded = np.arange(d.padded_seqlen) * 7 + 1
    want = np.concatenate([np.roll(padded[:total], -shift), padded[total:]])
    shifts = [make_shift_plan(d, shift, r) for r in range(cp_size)]
    check_casts(plan, [shifted.cast for shifted in shifts])
    assert "gather_index" not in repr(shifts[0]), "a plan is printed in a line, without its rows"
    for rank, shifted in enumerate(shifts):
        received = [padded[a:b] for a, b in shifted.cast.recv_ranges.tolist()]
        rows = np.concatenate([padded[d.position_ids(rank)], *received])
        assert np.array_equal(rows[shifted.gather_index], want[d.position_ids(rank)])
