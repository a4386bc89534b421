"""The swap search against LPT: never more rows or load, and far fewer rows where there is slack."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import AttnMask, AttnPlan, HeadShape, masks
from megatron_magi.core.plan import make_attn_plan
from tests.dense import random_mask
from tests.knobs import magi_config


def both(mask: AttnMask, cp_size: int, **config: int) -> tuple[AttnPlan, AttnPlan]:
    """(LPT, swap) at the same chunk size."""
    swap = make_attn_plan(mask, cp_size, HeadShape(8, 2, 64), magi_config(**config))
    chunk_size = swap.layout.chunk_size
    lpt = magi_config(**{**config, "chunk_size": chunk_size}, swap_trials=0)
    return make_attn_plan(mask, cp_size, HeadShape(8, 2, 64), lpt), swap


@given(seed=st.integers(0, 2**31), length=st.integers(32, 400), cp_size=st.integers(2, 8))
@settings(max_examples=60, deadline=None)
def test_never_worse_than_lpt(seed: int, length: int, cp_size: int) -> None:
    mask = random_mask(seed, length, length, max_slices=10)
    lpt, swap = both(mask, cp_size, chunk_size=4, tile_q=4, tile_k=4)
    assert swap.imbalance <= max(1.01, lpt.imbalance)
    if lpt.imbalance <= 1.01:
        assert swap.rows_received.sum() <= lpt.rows_received.sum()


@pytest.mark.parametrize("cp_size", [4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_packed_documents_stay_together(seed: int, cp_size: int) -> None:
    lengths = np.random.default_rng(seed).lognormal(7, 1, 8 * cp_size).astype(int) + 1
    mask = masks.from_cu_seqlens([0, *np.cumsum(lengths).tolist()])
    lpt, swap = both(mask, cp_size, chunk_size=256)
    assert swap.rows_received.sum() <= 0.35 * lpt.rows_received.sum()
