"""A plan of four ranks whose exchanges come in three stages."""

from __future__ import annotations

import pytest

from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.core.plan import make_attn_plan


@pytest.fixture(scope="module")
def stages() -> list:
    plan = make_attn_plan(
        masks.causal(4096), 4, HeadShape(4, 2, 64), MagiConfig(overlap_degree=3, chunk_size=64)
    )
    return [stage for rank in range(4) for stage in plan.rank_plan(rank).stages]
