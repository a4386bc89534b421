"""Cross-attention, and queries that are sent to their keys. Each function asserts by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import megatron_magi as magi
from megatron_magi import AttnMask, MagiConfig, TokenLayout
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.runtime.dist_attn import dist_attn_and_max_logits
from tests.core.runtime.runtime_jobs import SHAPE, staged
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
from tests.process_pool import on_subgroup, subgroup


def random_layout(seed: int, total: int, cp_size: int) -> TokenLayout:
    """A layout that no planner would choose; some are padded."""
    rng = np.random.default_rng(seed)
    chunk_size, per_rank = int(rng.integers(1, 5)), 1
    while chunk_size * per_rank * cp_size < total:
        per_rank += 1
    ranks = rng.permutation(np.repeat(np.arange(cp_size, dtype=np.int32), per_rank))
    return TokenLayout(total, chunk_size, cp_size, ranks)


def check_against_dense(
    mask: AttnMask,
    plan: AttnPlan,
    group: Any,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Dispatch, attend, undispatch, backward, against the dense fp64 answer."""
    q, k, v, dout = random_qkv(mask, 4, plan.head_shape.num_heads_kv, 8, dtype, seed)
    local = _local(plan, group, q, k, v)
    out, lse = (magi.undispatch(x, plan, group) for x in magi.dist_attn(*local, plan, group))
    grads = torch.autograd.grad(out, (q, k, v), dout)
    made = dict(zip(NAMES, (out, lse, *grads), strict=True))
    assert_as_good_as_dense(made, (q, k, v, dout), mask, dtype)


def _local(plan: AttnPlan, group: Any, *qkv: torch.Tensor) -> list[torch.Tensor]:
    return [
        magi.dispatch(x, plan, group, side=side)
        for x, side in zip(qkv, ("queries", "keys", "keys"), strict=True)
    ]


def random_masks(
    rank: int, cp_size: int, seeds: list[int], degree: int | str | None, sends: bool | None
) -> tuple[int, int]:
    """Any legal mask of any two lengths, on layouts of the planner and on others.

    Returns:
        How many of the plans send queries, and keys.
    """
    group = subgroup(cp_size)
    counts = [0, 0]
    if rank >= cp_size:
        return 0, 0
    for seed in seeds:
        num_q, num_k = 1 + seed % (41 if seed % 3 else 9), 1 + (7 * seed) % 97
        mask = random_mask(seed, num_q, num_k)
        config = staged(degree, send_queries=sends, keep_received_keys=seed % 3 == 0)
        given = {}
        if seed % 2:
            given["layout"] = random_layout(seed, num_q, cp_size)
        if seed % 5 > 1:
            given["key_layout"] = random_layout(seed + 1, num_k, cp_size)
        plan = magi.plan(mask, group, SHAPE, config, **given)
        counts[0] += len(plan.query_transfers) > 0
        counts[1] += len(plan.transfers) > 0
        try:
            check_against_dense(mask, plan, group, torch.float64, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, cp {cp_size}, degree {degree}: {error}") from error
    return counts[0], counts[1]


@on_subgroup
def in_dtype(rank: int, group: Any, dtype: torch.dtype) -> None:
    """Few queries on many keys: every rank sends its queries to the others."""
    mask = AttnMask([[0, 9, 0, 200, -300, 300], [9, 24, 100, 220, -300, 300]], 24, 220)
    plan = magi.plan(mask, group, SHAPE, staged(1))
    assert len(plan.query_transfers)
    check_against_dense(mask, plan, group, dtype, 3)


@on_subgroup
def one_query_at_an_odd_width(rank: int, group: Any, dtype: torch.dtype) -> None:
    """A received row of q and dout is odd, so that lse begins in the middle of an fp32."""
    mask = AttnMask([[0, 1, 0, 90, -300, 300]], 1, 90)
    plan = magi.plan(mask, group, magi.HeadShape(3, 1, 5, head_dim_v=8), staged(1))
    assert len(plan.query_transfers)
    q, k, v, dout = random_qkv(mask, 3, 1, (5, 8), dtype, 3)
    out, _ = magi.dist_attn(*_local(plan, group, q, k, v), plan, group)
    grads = torch.autograd.grad(magi.undispatch(out, plan, group), (q, k, v), dout)
    made = dict(zip(NAMES[2:], grads, strict=True))
    assert_as_good_as_dense(made, (q, k, v, dout), mask, dtype)


@on_subgroup
def relays_of_keys(rank: int, group: Any, degree: int | str) -> None:
    """Between nodes some keys are sent through relays, and queries go to other keys."""
    sent = 0
    for seed in range(10):
        mask = random_mask(seed, 40, 77)
        config = staged(degree, send_queries=True, ranks_per_node=2, chunk_size=3)
        given = {"key_layout": random_layout(seed, 77, group.size())}
        plan = magi.plan(mask, group, magi.HeadShape(4, 4, 8), config, **given)
        sent += len(plan.query_transfers) * len(plan.transfers)
        check_against_dense(mask, plan, group, torch.float64, seed)
    assert sent


@on_subgroup
def self_attention(rank: int, group: Any, deterministic: bool) -> None:
    """Contiguous homes and as many key heads as query heads: there queries are worth sending."""
    shape = magi.HeadShape(4, 4, 8)
    mask = magi.masks.causal(64)
    layout = TokenLayout(
        64, 64 // group.size(), group.size(), np.arange(group.size(), dtype=np.int32)
    )
    config = MagiConfig(send_queries=True, deterministic=deterministic, dkv_reduce_in_fp32=True)
    plan = magi.plan(mask, group, shape, config, layout=layout)
    assert len(plan.query_transfers)
    q, k, v, dout = random_qkv(mask, 4, 4, 8, torch.float64, 1)
    out, _ = magi.dist_attn(*(magi.dispatch(x, plan, group) for x in (q, k, v)), plan, group)
    whole = magi.undispatch(out, plan, group)
    exact = gradients(q, k, v, dout, mask, torch.float64)
    torch.testing.assert_close(whole, exact["out"])
    for name, got in zip(("dq", "dk", "dv"), torch.autograd.grad(whole, (q, k, v), dout),
                         strict=True):  # fmt: skip
        torch.testing.assert_close(got, exact[name], msg=name)


@on_subgroup
def sinks_lse_and_largest_logits(rank: int, group: Any) -> None:
    """What joins a row once, and what is found over all of its keys."""
    mask = AttnMask([[0, 12, 0, 150, -300, 300]], 16, 160)
    plan = magi.plan(mask, group, SHAPE, staged(1))
    assert len(plan.query_transfers)
    q, k, v, dout = random_qkv(mask, 4, 2, 8, torch.float64, 5)
    generator = torch.Generator().manual_seed(7)
    sink, dlse = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (16, 4))
    )
    sink.requires_grad_()
    softmax = magi.Softmax(0.3, 0.7, sink)
    *parts, most = dist_attn_and_max_logits(*_local(plan, group, q, k, v), plan, group, softmax)
    torch.testing.assert_close(most, dense_largest(q, k, mask, 0.3, 0.7))
    made = [magi.undispatch(x, plan, group) for x in parts]
    got = [*torch.autograd.grad(made, (q, k, v, sink), (dout, dlse))]
    torch.distributed.all_reduce(got[3], group=group)
    want = with_sinks(*dense_attention(q, k, v, mask, 0.3, 0.7), sink)
    exact = torch.autograd.grad(want, (q, k, v, sink), (dout, dlse))
    for name, a, b in zip((*NAMES, "dsink"), (*made, *got), (*want, *exact), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, w=name: f"{w}: {m}")


@on_subgroup
def keys_go_out_and_come_back(rank: int, group: Any) -> None:
    """``side`` names the sequence; rows, positions and gradients are those of the keys."""
    mask = AttnMask([[0, 10, 0, 33, -99, 99]], 10, 33)
    plan = magi.plan(mask, group, SHAPE)
    x = torch.arange(33.0).requires_grad_()
    local = magi.dispatch(x, plan, group, side="keys")
    assert len(local) == plan.key_layout.num_local_tokens
    back = magi.undispatch(local, plan, group, side="keys")
    assert torch.equal(back, x)
    assert torch.equal(torch.autograd.grad(back.sum(), x)[0], torch.ones(33))
    positions = magi.position_ids(plan, group, side="keys")
    real = torch.from_numpy(plan.key_layout.position_ids(rank)) < 33
    assert torch.equal(local[real], x[positions[real]])
