"""What the tests of dispatch, undispatch and agreement run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_magi as magi
from megatron_magi import AgreementError, HeadShape, MagiConfig, masks
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.runtime.agreement.comparison import (
    agree_later,
    finish_agreement,
    open_agreement,
)
from megatron_magi.core.runtime.dist_attn import dist_attn_and_max_logits
from tests.knobs import magi_config
from tests.process_pool import on_subgroup

SHAPE = HeadShape(2, 1, 4)


@on_subgroup
def partial_gradients_are_summed_in_a_copy(rank: int, group: Any) -> None:
    """The gradient belongs to the other summand, and to the caller, too."""
    plan = magi.plan(masks.causal(24), group, SHAPE)
    x, bias = (torch.randn(24, 2, requires_grad=True) for _ in range(2))
    full = magi.undispatch(magi.dispatch(x, plan, group), plan, group, is_partial_grad=True)
    given = torch.ones(24, 2)
    dx, dbias = torch.autograd.grad(bias + full, (x, bias), given)
    assert (dx == group.size()).all() and (dbias == 1).all() and (given == 1).all()


@on_subgroup
def padding_has_no_gradient(rank: int, group: Any) -> None:
    """Rows behind the sequence are no part of it, whatever a rank computes from them."""
    plan = magi.plan(masks.causal(21), group, SHAPE, MagiConfig(chunk_size=4))
    layout = plan.layout
    assert layout.padded_seqlen > 21
    local = torch.randn(layout.num_local_tokens, 2, requires_grad=True)
    positions = magi.position_ids(plan, dist.get_rank(group))
    is_token = positions.diff(prepend=torch.tensor([-1])) != 0  # padding repeats the last position
    for partial in (False, True):
        full = magi.undispatch(local, plan, group, is_partial_grad=partial)
        (grad,) = torch.autograd.grad(full, local, torch.full((21, 2), 3.0))
        assert (grad[is_token] == 3 * (group.size() if partial else 1)).all()
        assert (grad[~is_token] == 0).all()


@on_subgroup
def largest_scores(rank: int, group: Any, degree: int | None) -> None:
    torch.manual_seed(3)
    mask = masks.from_cu_seqlens([0, 11, 30])
    plan = magi.plan(mask, group, SHAPE, magi_config(overlap_degree=degree))
    q, k, v = torch.randn(30, 2, 4), torch.randn(30, 1, 4), torch.randn(30, 1, 4)
    local = [magi.dispatch(x, plan, group).requires_grad_() for x in (q, k, v)]
    out, lse, most = dist_attn_and_max_logits(*local, plan, group, magi.Softmax(0.7))
    assert out.requires_grad and not most.requires_grad
    torch.testing.assert_close(most, dense_largest(q, k, mask, 0.7))
    plain = magi.dist_attn(*local, plan, group, magi.Softmax(0.7))
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])


def dense_largest(q: Tensor, k: Tensor, mask: AttnMask, scale: float) -> Tensor:
    """[H], from all scores."""
    scores = torch.einsum("thd,sd->hts", q, k[:, 0]) * scale
    hidden = ~torch.from_numpy(mask.to_dense())
    return scores.masked_fill(hidden, -torch.inf).amax((1, 2))


DTYPES = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.int64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float16, torch.bfloat16,
    torch.float64, torch.complex64,
)  # fmt: skip


@on_subgroup
def any_dtype(rank: int, group: Any) -> None:
    """Also of rows that are padded on some ranks and not on others."""
    plan = magi.plan(masks.causal(29), group, SHAPE, MagiConfig(chunk_size=4))
    is_pad = torch.from_numpy(plan.layout.position_ids(dist.get_rank(group))) >= 29
    zeros_and_ones, one = torch.arange(58).view(29, 2) % 2, torch.ones(1, 2)
    for dtype in DTYPES:
        x = zeros_and_ones.to(dtype)
        local = magi.dispatch(x, plan, group, pad_value=1)
        assert local.dtype == dtype
        assert (as_bytes(local)[is_pad] == as_bytes(one.to(dtype))).all(), dtype
        back = magi.undispatch(local, plan, group)
        assert back.dtype == dtype and torch.equal(as_bytes(back), as_bytes(x)), dtype
        next_rows = magi.undispatch(magi.shift_tokens(local, 1, plan, group), plan, group)
        assert torch.equal(as_bytes(next_rows), as_bytes(x).roll(-1, 0)), dtype


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@on_subgroup
def gradients_in_fp8(rank: int, group: Any) -> None:
    plan = magi.plan(masks.causal(29), group, SHAPE, MagiConfig(chunk_size=4))
    x, given = ((torch.arange(58).view(29, 2) % n).to(torch.float8_e4m3fn) for n in (3, 7))
    leaf = x.requires_grad_()
    full = magi.undispatch(magi.dispatch(leaf, plan, group), plan, group)
    (grad,) = torch.autograd.grad(full, leaf, given)
    assert grad.dtype == x.dtype and torch.equal(as_bytes(grad), as_bytes(given))


def other_default_device(rank: int, cp_size: int) -> None:
    """A job's default device is not where tables and messages between hosts belong."""
    groups = [dist.new_group(list(range(cp_size))) for _ in range(2)]  # whose messages are new
    if rank >= cp_size:
        return
    torch.manual_seed(4)
    x = torch.randn(29, 2, 4)
    want, got = [], []
    for group, device, results in zip(groups, ("cpu", "meta"), (want, got), strict=True):
        with torch.device(device):
            results += round_trip(x.clone().requires_grad_(), group)
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


def round_trip(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The results and the gradient of every call that moves tokens, by a plan of its own."""
    plan = magi.plan(masks.causal(29), group, SHAPE, MagiConfig(chunk_size=4))
    q = magi.dispatch(x, plan, group)
    kv = q[:, :1]
    out, lse = magi.dist_attn(q, kv, kv, plan, group)
    later = magi.shift_tokens(out, 1, plan, group)
    full = magi.undispatch(later, plan, group, is_partial_grad=True)
    (grad,) = torch.autograd.grad(full.square().sum(), x)
    return [lse.detach(), full.detach(), grad, magi.position_ids(plan, group)]


@on_subgroup
def lazy_bits(rank: int, group: Any) -> None:
    """A negative or conjugate bit that torch has not resolved yet, on one rank's rows alone."""
    plan = magi.plan(masks.causal(32), group, SHAPE)
    x = torch.complex(torch.arange(64.0).view(32, 2), torch.arange(64.0, 128.0).view(32, 2))
    local = magi.dispatch(x, plan, group)
    for plain, lazy in (
        (-local.real.contiguous(), torch._neg_view(local.real.contiguous())),
        (local.conj_physical(), local.conj()),
    ):
        back = magi.undispatch(lazy if dist.get_rank(group) == 0 else plain, plan, group)
        assert torch.equal(back, magi.undispatch(plain, plan, group))
    leaf = x.clone().requires_grad_()
    magi.dispatch(leaf, plan, group).imag.sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(x, 1j))


@on_subgroup
def second_derivatives(rank: int, group: Any) -> str:
    plan = magi.plan(masks.causal(24), group, SHAPE)
    q, k = (torch.randn(plan.layout.num_local_tokens, h, 4, requires_grad=True) for h in (2, 1))
    out, _ = magi.dist_attn(q, k, k, plan, group)
    (grad,) = torch.autograd.grad((out * out * q).sum(), q, create_graph=True)
    try:
        grad.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@on_subgroup
def after_a_disagreement(rank: int, group: Any) -> None:
    """Whoever handles the error goes on with the next batch: nothing stale is left."""
    config = MagiConfig(agreement_timeout_s=20)
    right = magi.plan(masks.full(24), group, SHAPE, config)
    wrong = magi.plan(masks.causal(24), group, SHAPE, config) if rank == 1 else right
    for _ in range(3):
        magi.dispatch(torch.zeros(24, 1), wrong, group)
    try:
        magi.agree(wrong, group)
    except AgreementError:
        pass
    else:
        raise AssertionError("no error")
    magi.agree(right, group)  # rank 0 tried this plan before, rank 1 did not
    magi.dispatch(torch.zeros(24, 1), right, group)
    magi.agree(right, group)


@on_subgroup
def other_second_masks(rank: int, group: Any) -> str:
    """A mask that came without a dispatch call is compared when it is first used."""
    config = MagiConfig(agreement_timeout_s=20)
    first = magi.plan(masks.causal(24), group, SHAPE, config)
    q, k = (magi.dispatch(torch.zeros(24, h, 4), first, group) for h in (2, 1))
    magi.dist_attn(q, k, k, first, group)
    window = masks.sliding_window(24, (7 if rank == 1 else 5, 0))
    plan = magi.plan(window, group, SHAPE, config, layout=first.layout)
    try:
        magi.dist_attn(q, k, k, plan, group)
    except AgreementError as error:
        return str(error)
    return "no error"


def later_comparisons(rank: int, cp_size: int) -> list[str]:
    """What an opened group says of one differing plan, and of an equal one after that."""
    group = dist.new_group(list(range(cp_size)))  # of its own: others are context-parallel ones
    if rank >= cp_size:
        return []
    right = magi.plan(masks.full(24), group, SHAPE)
    wrong = magi.plan(masks.causal(24), group, SHAPE) if rank == 1 else right
    agree_later(wrong, group)  # not opened yet: nothing happens
    open_agreement(group, "stages", 20)
    said = []
    for plan in (wrong, right):
        try:
            agree_later(plan, group)
            finish_agreement(group)
            said.append("equal")
        except AgreementError as error:
            said.append(str(error))
    return said
