"""What the tests of kept keys run on every rank. Each function asserts by itself."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import megatron_magi as magi
from megatron_magi import AttnMask
from megatron_magi.core.comm.hierarchical import cast_rows
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.runtime import stage_context
from tests.core.runtime.runtime_jobs import NAMED, SHAPE, check_against_dense, staged
from tests.dense import random_mask, random_qkv
from tests.knobs import magi_config
from tests.process_pool import on_subgroup


@on_subgroup
def random_masks(
    rank: int, group: Any, seeds: list[int], degree: int | str | None, how: dict[str, Any]
) -> None:
    """The dense fp64 answer, and no cast in the backward: ``how`` are more knobs."""
    for seed in seeds:
        length = 1 + seed % 61
        config = staged(degree, keep_received_keys=True, **how)
        with mock.patch.object(stage_context, "cast_rows", wraps=cast_rows) as casts:
            check_against_dense(
                random_mask(seed, length, length), config, group, torch.float64, seed
            )
        plan = magi.plan(random_mask(seed, length, length), group, SHAPE, config)
        assert casts.call_count == casts_of_a_forward(plan, rank), f"seed {seed}"


def casts_of_a_forward(plan: AttnPlan, rank: int) -> int:
    return sum(stage.cast is not None for stage in plan.rank_plan(rank).forward_stages)


@on_subgroup
def mixed_stages(rank: int, group: Any, degree: int, mode: Any, name: str) -> None:
    """The backward's stages are cut otherwise than the forward's."""
    config = magi_config(overlap_degree=degree, forward_mode=mode, keep_received_keys=True)
    check_against_dense(NAMED[name], config, group, torch.float64, 5)


def saved_by(
    mask: AttnMask, group: Any, keeps: bool, wants_grad: bool
) -> tuple[list[Tensor], Tensor, tuple[Tensor, ...]]:
    """What a call saves for its backward, its output and its inputs."""
    q, k, v, _ = random_qkv(mask, 4, 2, 8, torch.float64, 1)
    plan = magi.plan(mask, group, SHAPE, staged(1, keep_received_keys=keeps))
    local = [magi.dispatch(x, plan, group).detach() for x in (q, k, v)]
    local = [x.requires_grad_(wants_grad) for x in local]
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, _ = magi.dist_attn(*local, plan, group)
    return saved, out, tuple(local)


@on_subgroup
def what_is_saved(rank: int, group: Any) -> None:
    """The received rows, once; nothing of them without the knob or without a gradient; and a
    second backward reads them again."""
    mask = NAMED["full"]
    plain, _, _ = saved_by(mask, group, keeps=False, wants_grad=True)
    kept, out, inputs = saved_by(mask, group, keeps=True, wants_grad=True)
    none, _, _ = saved_by(mask, group, keeps=True, wants_grad=False)
    received = 64 - 64 // group.size()
    assert len(kept) == len(plain) + 1 and not none
    assert kept[-1].shape == (received, 2 * 2 * 8)
    first, second = (
        torch.autograd.grad(out.sum(), inputs, retain_graph=retain) for retain in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@on_subgroup
def recomputed(rank: int, group: Any) -> None:
    """Under activation checkpointing the recomputed forward keeps its rows for the backward."""
    mask = NAMED["packed"]
    q, k, v, dout = random_qkv(mask, 4, 2, 8, torch.float64, 1)
    plan = magi.plan(mask, group, SHAPE, staged(2, keep_received_keys=True))
    local = [magi.dispatch(x, plan, group).detach().requires_grad_() for x in (q, k, v)]
    dout = magi.dispatch(dout, plan, group)
    plain = torch.autograd.grad(magi.dist_attn(*local, plan, group)[0], local, dout)
    with mock.patch.object(stage_context, "cast_rows", wraps=cast_rows) as casts:
        out = checkpoint(lambda *x: magi.dist_attn(*x, plan, group)[0], *local, use_reentrant=False)
        again = torch.autograd.grad(out, local, dout)
    assert casts.call_count == 2 * casts_of_a_forward(plan, rank)  # computed twice
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
