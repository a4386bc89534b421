"""What is kept with a plan: shared by equal copies that torch makes, and by no other."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.utils import _apply_to_tensors

import megatron_magi as magi
from megatron_magi import AttnPlan
from tests.core.runtime.test_prepared import CPU, make_plan, use
from tests.process_pool import pool


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_plan_stays_a_value(copied: Callable[[AttnPlan], AttnPlan]) -> None:
    plan = make_plan()
    before = pickle.dumps(plan), pickle.dumps(plan.layout), hash(plan), repr(plan)
    use(plan)
    assert (pickle.dumps(plan), pickle.dumps(plan.layout), hash(plan), repr(plan)) == before
    twin = copied(plan)
    assert twin == plan and twin.digest == plan.digest and twin.layout == plan.layout
    assert twin._kept.prepared == {} and plan._kept.prepared and plan.layout._kept.prepared


def test_torchs_copies_share_what_is_kept() -> None:
    """FSDP and DDP in mixed precision rebuild the dataclasses among a model's inputs."""
    plan = make_plan()
    use(plan)
    (twin,) = _apply_to_tensors(lambda x: x.bfloat16(), [plan])
    assert twin is not plan and twin == plan and pickle.dumps(twin) == pickle.dumps(plan)
    assert twin._kept is plan._kept and twin.layout._kept is plan.layout._kept


class Attention(torch.nn.Module):
    """One layer whose plan comes with its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.seen = torch.nn.Linear(8, 16), []

    def forward(self, x: torch.Tensor, plan: AttnPlan) -> torch.Tensor:
        self.seen.append(plan)
        q, k, v = self.qkv(x).view(len(x), 4, 4).split([2, 1, 1], dim=1)
        return magi.dist_attn(q, k, v, plan, dist.group.WORLD)[0]


def fsdp_outputs(rank: int) -> list[Any]:
    plan = make_plan(cp_size=2)
    torch.manual_seed(0)
    layer, x = Attention().bfloat16(), torch.randn(60, 8).bfloat16()
    rows = magi.dispatch(x, plan, dist.group.WORLD)
    alone = layer(rows, plan)
    wrapped = FullyShardedDataParallel(
        layer, mixed_precision=MixedPrecision(torch.bfloat16), device_id=CPU
    )
    first, second = (wrapped(rows, plan) for _ in range(2))
    return [
        torch.equal(first, alone) and torch.equal(second, alone),
        layer.seen[1] is not plan,
        all(each._kept is plan._kept for each in layer.seen),
    ]


def test_a_plan_is_an_argument_of_a_model_under_fsdp() -> None:
    assert pool(2).run(fsdp_outputs) == [[True, True, True]] * 2


def test_a_changed_copy_shares_nothing() -> None:
    plan = make_plan()
    use(plan)
    other = make_plan(seed=1)
    assert other.mask != plan.mask
    for changed in (
        replace(plan, mask=other.mask),
        replace(plan, forward_mode="at_once"),
        replace(plan, transfers=plan.transfers[:0]),
        replace(plan, config=replace(plan.config, deterministic=True)),
    ):
        assert changed._kept.prepared == {} and changed._kept.rank_plans == {}
        assert replace(changed)._kept.prepared == {}
    moved = plan.layout.chunk_ranks[::-1].copy()
    assert replace(plan.layout, chunk_ranks=moved)._kept.prepared == {}
    assert plan._kept.prepared and plan.layout._kept.prepared
