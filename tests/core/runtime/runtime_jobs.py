"""What the runtime tests run on every rank. Each function asserts by itself."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import megatron_magi as magi
from megatron_magi import AttnMask, HeadShape, MagiConfig, masks
from megatron_magi.core.comm.group_cast import group_cast
from megatron_magi.core.comm.group_reduce import add_partials, group_reduce
from megatron_magi.core.comm.hierarchical import reduce_rows
from megatron_magi.core.comm.prepared_cast import prepare_casts
from megatron_magi.core.comm.transport import AllToAll
from megatron_magi.core.plan import GroupCastPlan, StagePlan
from megatron_magi.core.runtime import dist_attn, staged_backward
from megatron_magi.core.runtime.agreement.comparison import AgreementError
from megatron_magi.core.runtime.plan_cache import cached_plan
from tests.dense import (
    NAMES,
    assert_as_good_as_dense,
    dense_attention,
    dense_largest,
    gradients,
    random_mask,
    random_qkv,
    with_sinks,
)
from tests.knobs import magi_config
from tests.process_pool import on_subgroup

SHAPE = HeadShape(4, 2, 8)


def run_attention(
    mask: AttnMask, config: MagiConfig, group: Any, dtype: torch.dtype, seed: int,
    shape: HeadShape = SHAPE,
) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:  # fmt: skip
    """Dispatch, attend, undispatch, backward: full tensors out of a full sequence."""
    dims = shape.head_dim, shape.value_dim
    q, k, v, dout = random_qkv(mask, shape.num_heads_q, shape.num_heads_kv, dims, dtype, seed)
    plan = magi.plan(mask, group, shape, config)
    local = [magi.dispatch(x, plan, group) for x in (q, k, v)]
    out_local, lse_local = magi.dist_attn(*local, plan, group)
    out, lse = magi.undispatch(out_local, plan, group), magi.undispatch(lse_local, plan, group)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return dict(zip(NAMES, (out, lse, *grads), strict=True)), (q, k, v, dout)


def check_against_dense(
    mask: AttnMask, config: MagiConfig, group: Any, dtype: torch.dtype, seed: int,
    shape: HeadShape = SHAPE,
) -> None:  # fmt: skip
    ours, inputs = run_attention(mask, config, group, dtype, seed, shape)
    assert_as_good_as_dense(ours, inputs, mask, dtype)


def staged(degree: int | str | None, **knobs: Any) -> MagiConfig:
    """A fixed overlap degree, also of the forward; or a forward mode, its backward in two remote
    stages; None: all is the planner's, at costs that make it stage the backward."""
    if isinstance(degree, str):
        return magi_config(overlap_degree=2, forward_mode=degree, **knobs)  # type: ignore[arg-type]
    if degree is not None:
        return magi_config(overlap_degree=degree, forward_mode="staged", **knobs)
    slow = {"link_gib_s": 2e-3, "kernel_tflops": 1e-3, "memory_gib_s": 2e-3}
    return magi_config(**slow, stage_latency_us=0.0, **knobs)


@on_subgroup
def capped_logits(rank: int, group: Any, degree: int) -> None:
    """Forward, backward and the largest logits with softcap against the dense fp64 answer."""
    mask, softcap = NAMED["packed"], 0.7
    softmax = magi.Softmax(softcap=softcap)
    q, k, v, dout = random_qkv(mask, 4, 2, 8, torch.float64, 5)
    plan = magi.plan(mask, group, SHAPE, staged(degree))
    local = [magi.dispatch(x, plan, group) for x in (q, k, v)]
    own, own_lse, most = dist_attn.dist_attn_and_max_logits(*local, plan, group, softmax)
    assert torch.equal(magi.dist_attn(*local, plan, group, softmax)[0], own)
    largest = dense_largest(q, k, mask, 8**-0.5, softcap)
    torch.testing.assert_close(most, largest)
    out, lse = magi.undispatch(own, plan, group), magi.undispatch(own_lse, plan, group)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    exact = gradients(q, k, v, dout, mask, torch.float64, softcap)
    for name, got in zip(NAMES, (out, lse, *grads), strict=True):
        torch.testing.assert_close(got, exact[name])


@on_subgroup
def shapes_alone(rank: int, group: Any, degree: int | str | None) -> None:
    """All functions of distributed attention on the device "meta" and on the CPU."""
    plan = magi.plan(masks.from_cu_seqlens([0, 20, 64]), group, HeadShape(4, 2, 8), staged(degree))
    made = [_described(plan, group, torch.device(device)) for device in ("cpu", "meta")]
    assert made[0] == made[1]


def _described(plan: magi.AttnPlan, group: Any, device: torch.device) -> list[Any]:
    rows = {h: torch.zeros(64, h, 8, dtype=torch.bfloat16, device=device) for h in (4, 2)}
    q, k, v = (magi.dispatch(rows[h], plan, group).requires_grad_() for h in (4, 2, 2))
    softmax = magi.Softmax(sink=torch.zeros(1, 4, device=device), softcap=2.0)
    out, lse = magi.dist_attn(q, k, v, plan, group, softmax)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    whole, shifted = magi.undispatch(out, plan, group), magi.shift_tokens(q, 1, plan, group)
    made = (q, out, lse, *gradients, whole, shifted)
    assert {x.device.type for x in made} == {device.type}
    return [(x.shape, x.dtype, x.stride()) for x in made]


@on_subgroup
def sinks_on_every_stage(rank: int, group: Any, degree: int | str | None, per_token: bool) -> None:
    """out, lse and all gradients with sinks against dense fp64; both results are used."""
    chosen = {x: NAMED[x] for x in ("packed", "sees nothing", "fewer tokens than ranks")}
    chosen["pad rows"] = masks.from_cu_seqlens([0, 9, 70], total_seqlen=83)
    for name, mask in chosen.items():
        q, k, v, dout = random_qkv(mask, 4, 2, 8, torch.float64, 5)
        tokens = (len(q),) if per_token else ()
        generator = torch.Generator().manual_seed(7)
        shapes = (*tokens, 3, 4), dout.shape[:2]
        sink, dlse = (torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes)
        sink.requires_grad_()
        plan = magi.plan(mask, group, SHAPE, staged(degree))
        local = [magi.dispatch(x, plan, group) for x in (q, k, v)]
        mine = magi.dispatch(sink, plan, group) if per_token else sink
        parts = magi.dist_attn(*local, plan, group, magi.Softmax(0.3, 0.7, mine))
        made = [magi.undispatch(x, plan, group) for x in parts]
        got = [*torch.autograd.grad(made, (q, k, v, sink), (dout, dlse))]
        if not per_token:  # every rank has the share of its own rows
            torch.distributed.all_reduce(got[3], group=group)
        want = with_sinks(*dense_attention(q, k, v, mask, 0.3, 0.7), sink)
        exact = torch.autograd.grad(want, (q, k, v, sink), (dout, dlse))
        for which, a, b in zip((*NAMES, "dsink"), (*made, *got), (*want, *exact), strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, w=which, n=name: f"{w}, {n}: {m}")


@on_subgroup
def random_masks(
    rank: int, group: Any, config: MagiConfig, seeds: list[int], shape: HeadShape = SHAPE
) -> None:
    """Any legal mask gives the dense fp64 answer, forward and backward."""
    for seed in seeds:
        length = 1 + seed % 41
        mask = random_mask(seed, length, length)
        try:
            check_against_dense(mask, config, group, torch.float64, seed, shape)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {group.size()} ranks, {config}: {error}") from error


@on_subgroup
def named_mask(
    rank: int,
    group: Any,
    config: MagiConfig,
    name: str,
    dtype: torch.dtype,
    shape: HeadShape = SHAPE,
) -> None:
    check_against_dense(NAMED[name], config, group, dtype, len(name), shape)


NAMED = {
    "causal": masks.causal(96),
    "full": masks.full(64),
    "packed": masks.from_cu_seqlens([0, 5, 70, 71, 100, 128]),
    "window": masks.from_cu_seqlens([0, 60, 111], window_size=(17, 0)),
    "one token": masks.causal(1),
    "fewer tokens than ranks": masks.causal(3),
    "sees nothing": AttnMask([], 20, 20),
    "shared question": masks.shared_question([30, 9], [[20, 11, 5], [8]]),
    "block causal": masks.block_causal([[16, 20], [12, 12, 12]]),
    "block sparse": masks.from_block_mask(np.random.default_rng(0).random((7, 7)) < 0.4, 16, 103),
}


@on_subgroup
def wire_dtype(
    rank: int, group: Any, name: str, degree: int, dtype: torch.dtype, in_fp32: bool
) -> None:
    """Partial gradients travel in the dtype that was asked for, and are as good as one process."""
    seen: list[torch.dtype] = []

    def spy(partials: Any, *args: Any) -> Any:
        seen.append(partials.dtype)
        return reduce_rows(partials, *args)

    config = staged(degree, dkv_reduce_in_fp32=in_fp32)
    with mock.patch.object(staged_backward, "reduce_rows", spy):
        check_against_dense(NAMED[name], config, group, dtype, seed=len(name))
    assert seen and set(seen) == {torch.float32 if in_fp32 else dtype}


@on_subgroup
def mask_per_head_group(rank: int, group: Any) -> None:
    """A plan per group of heads on the first one's layout, against one process."""
    blocks = np.random.default_rng(1).random((2, 6, 6)) < 0.4
    chosen = [masks.from_block_mask(x, 16) for x in blocks]
    first = magi.plan(chosen[0], group, HeadShape(2, 1, 8))
    plans = [first, magi.plan(chosen[1], group, HeadShape(2, 1, 8), layout=first.layout)]
    q, k, v, dout = random_qkv(chosen[0], 4, 2, 8, torch.float64, 0)
    local = [magi.dispatch(x, first, group).split(x.shape[1] // 2, dim=1) for x in (q, k, v)]
    outs = [
        magi.dist_attn(*part, plan, group)[0] for *part, plan in zip(*local, plans, strict=True)
    ]
    out = magi.undispatch(torch.cat(outs, dim=1), first, group)
    want, _ = magi.flex_flash_attn_by_head_group(q, k, v, chosen)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)
    for got, expected in zip(
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(want, (q, k, v), dout),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


@on_subgroup
def equal_bits(rank: int, group: Any) -> None:
    runs = [
        run_attention(NAMED["packed"], magi_config(overlap_degree=2), group, torch.float32, 3)[0]
        for _ in range(2)
    ]
    for name in NAMES:
        assert torch.equal(runs[0][name], runs[1][name]), name


@on_subgroup
def dispatch_round_trip(rank: int, group: Any, length: int) -> None:
    plan = magi.plan(masks.causal(length), group, SHAPE)
    x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
    torch.distributed.broadcast(x.detach(), 0, group=group)
    local = magi.dispatch(x, plan, group, dim=1, pad_value=7.0)
    assert local.shape == (2, plan.layout.num_local_tokens, 3)
    back = magi.undispatch(local, plan, group, dim=1)
    assert torch.equal(back, x)
    positions = magi.position_ids(plan, group)
    is_real = torch.from_numpy(plan.layout.position_ids(rank)) < length
    assert torch.equal(local[:, is_real], x[:, positions[is_real]])
    assert (local[:, ~is_real] == 7.0).all()
    weight = torch.arange(float(length), dtype=torch.float64)[:, None]
    (grad,) = torch.autograd.grad((back * weight).sum(), x)
    assert torch.equal(grad, weight.expand(2, length, 3))
    (grad,) = torch.autograd.grad(
        (magi.undispatch(magi.dispatch(x, plan, group, 1), plan, group, 1, is_partial_grad=True)
         * weight * (rank + 1)).sum(), x)  # fmt: skip
    total = sum(range(1, group.size() + 1))
    torch.testing.assert_close(grad, weight.expand(2, length, 3) * total)


@on_subgroup
def cast_and_reduce(rank: int, group: Any) -> None:
    """Own rows and exactly the rows of the table; partial sums of those come home in full."""
    for degree in (2, "local_first", "at_once"):
        plan = magi.plan(NAMED["packed"], group, SHAPE, staged(degree))
        view = plan.rank_plan(rank)
        for stage in dict.fromkeys((*view.stages, *view.forward_stages)):
            if stage.cast is not None:
                cast_and_reduce_stage(stage, stage.cast, magi.position_ids(plan, group), group)


def cast_and_reduce_stage(
    stage: StagePlan, cast: GroupCastPlan, positions: torch.Tensor, group: Any
) -> None:
    rows = positions.to(torch.bfloat16)[:, None].expand(-1, 3).contiguous()
    (ready,) = prepare_casts([cast], rows.device)
    (keys, twice) = group_cast((rows, rows * 2), ready, AllToAll(group)).wait()
    kept = [int(positions[i]) for a, b in cast.own_ranges.tolist() for i in range(a, b)]
    wanted = [i for a, b in cast.recv_ranges.tolist() for i in range(a, b)]
    assert keys[:, 0].tolist() == kept + wanted
    assert len(keys) == stage.num_keys and len(kept) == stage.num_own
    assert torch.equal(twice, keys * 2)
    ones = torch.ones(len(wanted), 1, dtype=torch.float64)
    arriving = [group_reduce(ones * n, (torch.Size([1]),), ready, AllToAll(group)) for n in (1, 10)]
    own = torch.full((len(rows), 1), 0.5, dtype=torch.float64)
    (home,) = add_partials([own], arriving, torch.float32)
    sent = torch.zeros(len(rows), 1)
    for a, b in cast.send_ranges.tolist():
        sent[a:b] += 1
    assert home.dtype == torch.float32 and torch.equal(home, 11 * sent + 0.5)


@on_subgroup
def ranks_disagree(rank: int, group: Any, what: str) -> str:
    """Rank 1 plans something else: every rank gets the same error, and none hangs."""
    mask, config = masks.causal(64), magi_config(agreement_timeout_s=20)
    if rank == 1 and what == "mask":
        mask = masks.from_cu_seqlens([0, 31, 64])
    if rank == 1 and what == "config":
        config = magi_config(agreement_timeout_s=20, overlap_degree=3)
    plan = magi.plan(mask, group, SHAPE, config)
    x = torch.zeros(64, 4, 8)
    q = magi.dispatch(x, plan, group)
    k = magi.dispatch(x[:, :2], plan, group)
    try:
        magi.dist_attn(q, k, k, plan, group)
    except AgreementError as error:
        return str(error)
    return "no error"


@on_subgroup
def cache_hit_meets_miss(rank: int, group: Any) -> None:
    cached_plan.cache_clear()
    mask = masks.causal(40)
    if rank == 0:
        magi.plan(mask, group, SHAPE)
    plan = magi.plan(mask, group, SHAPE)
    assert cached_plan.cache_info().hits == (rank == 0)
    for _ in range(3):
        magi.dispatch(torch.zeros(40, 1), plan, group)
        magi.agree(plan, group)


@on_subgroup
def gradient_of_lse(rank: int, group: Any) -> None:
    mask = NAMED["packed"]
    q, k, v, _ = random_qkv(mask, 4, 2, 8, torch.float64, 2)
    weight = torch.sin(torch.arange(4.0 * len(q), dtype=torch.float64)).view(len(q), 4)
    plan = magi.plan(mask, group, SHAPE)
    _, lse = magi.dist_attn(*(magi.dispatch(x, plan, group) for x in (q, k, v)), plan, group)
    got = torch.autograd.grad((magi.undispatch(lse, plan, group) * weight).sum(), (q, k))
    want = torch.autograd.grad((dense_attention(q, k, v, mask, 8**-0.5)[1] * weight).sum(), (q, k))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def absent_rank(rank: int, num_batches: int) -> str:
    """Rank 1 of two stops after ``num_batches``; the other must not wait for ever."""
    group = torch.distributed.new_group()
    plan = magi.plan(masks.causal(16), group, SHAPE, magi_config(agreement_timeout_s=2))
    for step in range(num_batches + 1):
        if rank == 1 and step == num_batches:
            return "left"
        try:
            magi.dispatch(torch.zeros(16, 1), plan, group)
            magi.agree(plan, group)
        except AgreementError as error:
            return str(error)
    return "no error"
