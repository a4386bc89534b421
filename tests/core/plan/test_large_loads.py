"""Loads in tiles that are large enough to overflow a careless product."""

import pytest

from megatron_magi import HeadShape, masks
from megatron_magi.core.plan import make_attn_plan
from tests.knobs import magi_config


@pytest.mark.parametrize("cp_size", [3, 8, 64])
@pytest.mark.parametrize("tokens, tile", [(3 * 2**20, 128), (2**20, 16), (3 * 2**25, 128)])
def test_a_long_causal_sequence_keeps_the_load_cap(tokens: int, tile: int, cp_size: int) -> None:
    """Trading chunks once left a rank with 1.75 times the mean load here."""
    config = magi_config(tile_q=tile, tile_k=tile)
    plan = make_attn_plan(masks.causal(tokens), cp_size, HeadShape(8, 2, 64), config)
    assert plan.imbalance <= 1.01
