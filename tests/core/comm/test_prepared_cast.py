"""A cast's tables on a device: right, uploaded together, and shared where rows are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi import AttnPlan, HeadShape
from megatron_magi.core.comm.prepared_cast import (
    PreparedCast,
    PreparedNodeCast,
    prepare_casts,
    rows_of,
)
from megatron_magi.core.plan import NodeCastPlan, make_attn_plan
from tests.core.comm.cast_cases import check_cast
from tests.dense import random_mask
from tests.knobs import magi_config

CPU = torch.device("cpu")
MODES = ["at_once", "local_first", "staged"]


def plan_of(mode: str, degree: int, cp_size: int, **knobs: object) -> AttnPlan:
    config = magi_config(overlap_degree=degree, forward_mode=mode, **knobs)
    return make_attn_plan(random_mask(0, 60, 60), cp_size, HeadShape(2, 1, 4), config)


@pytest.mark.parametrize(
    "ranges, rows",
    [([], []), ([(3, 3)], []), ([(4, 6), (0, 3), (5, 6)], [4, 5, 0, 1, 2, 5])],
    ids=["none", "an empty one", "in their order"],
)
def test_rows_of_ranges(ranges: list[tuple[int, int]], rows: list[int]) -> None:
    made = rows_of(np.array(ranges, np.int32).reshape(-1, 2))
    assert made.dtype == np.int32 and made.tolist() == rows


@pytest.mark.parametrize("mode", MODES)
def test_tables_are_those_of_the_plan(mode: str) -> None:
    plan = plan_of(mode, 2, 3)
    for rank in range(3):
        view = plan.rank_plan(rank)
        casts = [s.cast for s in (*view.forward_stages, *view.stages) if s.cast is not None]
        made = prepare_casts(casts, CPU, reduced=casts[:1])
        assert len({id(x.send.buffer) for x in made}) == 1, "one upload"
        for number, (ready, cast) in enumerate(zip(made, casts, strict=True)):
            check_cast(ready, cast, view.num_local_tokens, is_reduced=number == 0)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_cast_without_its_reduce_has_no_sources(ranks: int) -> None:
    plan = plan_of("at_once", 0, ranks)
    casts = [s.cast for s in plan.rank_plan(0).stages if s.cast is not None]
    made = prepare_casts(casts, CPU, reduced=())
    assert [x.sources for x in made] == [None] * len(casts) and len(casts) == (ranks > 1)


def test_all_own_rows_need_no_table() -> None:
    (cast,) = (s.cast for s in plan_of("at_once", 0, 2).rank_plan(0).stages if s.cast is not None)
    every = np.array([[0, cast.num_rows]], np.int32)
    some = np.array([[0, 1], [2, cast.num_rows]], np.int32)
    behind = [cast, cast.with_own(every), cast.with_own(some)]
    none, whole, part = prepare_casts(behind, CPU)
    assert none.own is None and whole.own is None and whole.num_own == cast.num_rows
    assert part.own is not None and part.own.here().tolist() == [0, *range(2, cast.num_rows)]
    assert none.send is whole.send is part.send


def test_a_cast_among_nodes_has_two_legs() -> None:
    plan = plan_of("at_once", 0, 4, ranks_per_node=2)
    (cast,) = (s.cast for s in plan.rank_plan(0).stages if s.cast is not None)
    assert isinstance(cast, NodeCastPlan)
    (made,) = prepare_casts([cast], CPU)
    assert isinstance(made, PreparedNodeCast) and isinstance(made.first, PreparedCast)
    assert made.num_own == made.first.num_own
    for ready, leg in ((made.first, cast.first), (made.spreading, cast.spreading)):
        check_cast(ready, leg, leg.num_rows, is_reduced=True)
