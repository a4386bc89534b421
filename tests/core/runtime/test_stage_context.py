"""Keys and values of one stage after another, fetched while the stage before computes."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import megatron_magi as magi
from megatron_magi import masks
from megatron_magi.core.comm.hierarchical import cast_rows
from megatron_magi.core.runtime import stage_context
from tests.core.runtime.runtime_jobs import SHAPE, staged
from tests.dense import random_qkv
from tests.process_pool import on_subgroup, pool

WORLD = 5


@on_subgroup
def key_buffers(rank: int, group: Any) -> None:
    """At most two stages' keys are alive, forward and backward."""
    mask = masks.full(384)
    plan = magi.plan(mask, group, SHAPE, staged(5, tile_k=16))
    assert plan.overlap_degree == 5 and plan.rank_plan(rank).forward_merges
    made: list[StorageWeakRef] = []
    most = 0

    def spy(*args: Any) -> Any:
        nonlocal most
        pending = cast_rows(*args)
        made.append(StorageWeakRef(pending.buffer.untyped_storage()))
        deadline = time.monotonic() + 5  # gloo's thread lets go of a finished exchange in its time
        while (alive := sum(not ref.expired() for ref in made)) > 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        most = max(most, alive)
        return pending

    leaves = [
        magi.dispatch(x, plan, group).detach().requires_grad_()
        for x in random_qkv(mask, 4, 2, 8, torch.float32, 0)[:3]
    ]
    with mock.patch.object(stage_context, "cast_rows", spy):
        out, _ = magi.dist_attn(*leaves, plan, group)
        out.sum().backward()
    assert len(made) == 10 and most == 2, (len(made), most)


def test_two_stages_of_keys_are_alive() -> None:
    pool(WORLD).run(key_buffers, 3)
