"""What the tests over NCCL run on every rank. It asserts by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_magi as magi
from megatron_magi import AttnMask, HeadShape, masks
from megatron_magi.core.comm import reduce_group as reduce_group_module
from megatron_magi.core.comm.reduce_group import share_communicator
from megatron_magi.core.comm.transport_choice import CASTS_BEHIND_REDUCES
from megatron_magi.core.runtime import dist_attn
from tests.core.runtime.runtime_jobs import staged
from tests.dense import (
    NAMES,
    assert_as_good,
    dense_largest,
    gradients,
    random_qkv,
    summand_scales,
)


def on_gpus(
    rank: int, name: str, degree: int | str | None, widths: tuple[int, int], dtype: torch.dtype,
    how: dict[str, Any],
) -> None:  # fmt: skip
    """The CUDA kernel over NCCL, all ranks of the world, against the dense answer."""
    mask, group, device = GPU_MASKS[name], dist.group.WORLD, here()
    q, k, v, dout = random_qkv(mask, 8, 2, widths, dtype, seed=len(name), device=device)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    config = staged(degree, kernel_backend="cuda", **how)
    shape = HeadShape(8, 2, widths[0], head_dim_v=widths[1])
    plan = magi.plan(mask, group, shape, config)
    local = [magi.dispatch(x, plan, group) for x in (q, k, v)]
    own, own_lse = magi.dist_attn(*local, plan, group)
    out, lse = magi.undispatch(own, plan, group), magi.undispatch(own_lse, plan, group)
    with torch.no_grad():
        again, _, most = dist_attn.dist_attn_and_max_logits(*local, plan, group)
    assert torch.equal(again, own)
    largest = dense_largest(q, k, mask, widths[0] ** -0.5)
    torch.testing.assert_close(most.double(), largest, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    ours = dict(zip(NAMES, (out, lse, *grads), strict=True))
    exact = gradients(q, k, v, dout, mask, torch.float64)
    same = gradients(q, k, v, dout, mask, dtype)
    assert_as_good(ours, exact, same, dtype, summand_scales(exact, q, k, v, dout))


def one_and_two_communicators(rank: int, name: str, degree: int) -> None:
    """Equal bits with and without a communicator of their own for reduces, in a few backwards one
    behind the other without a wait of the host; deterministic, because dq is added up otherwise in
    an order that differs from run to run."""
    mask, device = GPU_MASKS[name], here()
    shared, own = dist.new_group(), dist.new_group()
    share_communicator(shared)
    *inputs, dout = random_qkv(mask, 8, 2, 128, torch.bfloat16, seed=3, device=device)
    how = {"kernel_backend": "cuda", "transport": "all_to_all", "deterministic": True}
    plan = magi.plan(mask, own, HeadShape(8, 2, 128), staged(degree, **how))
    q, k, v, local_dout = (magi.dispatch(x.detach(), plan, own) for x in (*inputs, dout))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    made = []
    for group in (shared, own) * 3:
        out, _ = magi.dist_attn(*leaves, plan, group)
        made.append(torch.autograd.grad(out, leaves, local_dout))
    for grads in made[1:]:
        assert all(torch.equal(x, y) for x, y in zip(grads, made[0], strict=True))
    num_casts = sum(stage.cast is not None for stage in plan.rank_plan(rank).stages)
    assert bool(reduce_group_module._opened.get(own)) == (num_casts >= CASTS_BEHIND_REDUCES)
    torch.cuda.synchronize(device)


def replays(rank: int, name: str, degree: int | str) -> None:
    """A CUDA graph of forward and backward gives the bits of calls, on other values of its inputs;
    deterministic, because dq is added up otherwise in an order that differs from run to run."""
    mask, group = GPU_MASKS[name], dist.group.WORLD
    how = {"kernel_backend": "cuda", "transport": "all_to_all", "deterministic": True}
    plan = magi.plan(mask, group, HeadShape(8, 2, 128), staged(degree, **how))

    def inputs(seed: int) -> list[torch.Tensor]:
        whole = random_qkv(mask, 8, 2, 128, torch.bfloat16, seed=seed, device=here())
        return [magi.dispatch(x.detach(), plan, group) for x in whole]

    *leaves, dout = inputs(0)
    leaves = [x.requires_grad_() for x in leaves]

    def attend() -> list[torch.Tensor]:
        out, lse = magi.dist_attn(*leaves, plan, group)
        return [out, lse, *torch.autograd.grad(out, leaves, dout)]

    attend()  # uploads the tables and opens what exchanges need
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for seed in (1, 2, 3):
        with torch.no_grad():
            for x, new in zip((*leaves, dout), inputs(seed), strict=True):
                x.copy_(new)
        graph.replay()
        replayed = [x.detach().clone() for x in captured]
        assert all(map(torch.equal, replayed, attend()))
    dist.barrier()  # no rank may release its graph while another one replays
    auto = replace(plan.config, transport="auto")
    plan = magi.plan(mask, group, HeadShape(8, 2, 128), auto)
    refused = pytest.raises(NotImplementedError, match="requires transport 'all_to_all' to be cap")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        magi.dist_attn(*leaves, plan, group)


def here() -> str:
    """This rank's GPU, which may be another rank's too."""
    return f"cuda:{torch.cuda.current_device()}"


GPU_MASKS = {
    "causal": masks.causal(2000),
    "packed": masks.from_cu_seqlens([0, 5, 700, 701, 1000, 1280, 2101]),
    "window": masks.from_cu_seqlens([0, 600, 1111], window_size=(170, 0)),
    "shared question": masks.shared_question([300, 90], [[200, 110, 50], [80]]),
    "sees nothing": AttnMask([], 200, 200),
}
