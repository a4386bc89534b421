"""One rank's view: what its exchanges hold, and how large its buffers are."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.core.plan import make_attn_plan
from megatron_magi.core.plan.rank_plan import most_buffered_rows


@pytest.fixture(scope="module")
def stages() -> list:
    plan = make_attn_plan(
        masks.causal(4096), 4, HeadShape(4, 2, 64), MagiConfig(overlap_degree=3, chunk_size=64)
    )
    return [stage for rank in range(4) for stage in plan.rank_plan(rank).stages]


def test_buffers_are_those_of_two_stages_that_exchange(stages: list) -> None:
    assert sum(stage.cast is None for stage in stages) == 4
    local, *remote = stages[:4]
    sizes = [stage.num_keys for stage in remote]
    assert local.num_own == local.num_keys > 0 and all(sizes)
    assert most_buffered_rows([local]) == 0
    assert most_buffered_rows([local, remote[0]]) == sizes[0]
    assert most_buffered_rows([local, *remote]) == max(sizes[0] + sizes[1], sizes[1] + sizes[2])


def test_tables_of_an_exchange_cannot_be_changed(stages: list) -> None:
    for cast in (stage.cast for stage in stages if stage.cast is not None):
        for table in (cast.send_ranges, cast.recv_ranges, cast.own_ranges):
            assert not table.flags.writeable
        assert cast.num_recv == sum(e - s for s, e in cast.recv_ranges.tolist())
        assert cast.num_sent == sum(e - s for s, e in cast.send_ranges.tolist())


def test_slices_of_a_stage_cannot_be_changed(stages: list) -> None:
    assert not any(stage.slices.flags.writeable for stage in stages)


def test_own_rows_in_front_are_counted(stages: list) -> None:
    from dataclasses import replace

    cast = next(stage.cast for stage in stages if stage.cast is not None)
    assert cast.num_own == 0
    assert replace(cast, own_ranges=np.array([[3, 5], [7, 8]], np.int32)).num_own == 3
