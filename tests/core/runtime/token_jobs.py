"""What the tests of dispatch, undispatch and agreement run on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

import megatron_magi as magi
from megatron_magi import AgreementError, HeadShape, MagiConfig, masks
from megatron_magi.core.runtime.agreement import agree_later, finish_agreement, open_agreement
from tests.process_pool import subgroup

SHAPE = HeadShape(2, 1, 4)


def partial_gradients_are_summed_in_a_copy(rank: int, cp_size: int) -> None:
    """The gradient belongs to the other summand, and to the caller, too."""
    group = subgroup(cp_size)
    if rank >= cp_size:
        return
    plan = magi.plan(masks.causal(24), group, SHAPE)
    x, bias = (torch.randn(24, 2, requires_grad=True) for _ in range(2))
    full = magi.undispatch(magi.dispatch(x, plan, group), plan, group, is_partial_grad=True)
    given = torch.ones(24, 2)
    dx, dbias = torch.autograd.grad(bias + full, (x, bias), given)
    assert (dx == cp_size).all() and (dbias == 1).all() and (given == 1).all()


def any_dtype(rank: int, cp_size: int) -> None:
    group = subgroup(cp_size)
    if rank >= cp_size:
        return
    plan = magi.plan(masks.causal(32), group, SHAPE)
    bits = torch.arange(64).view(32, 2) % 2
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float8_e4m3fn,
                  torch.float16, torch.bfloat16, torch.float64, torch.complex64):  # fmt: skip
        x = bits.to(dtype)
        back = magi.undispatch(magi.dispatch(x, plan, group), plan, group)
        assert back.dtype == dtype
        assert torch.equal(back.contiguous().view(torch.uint8), x.view(torch.uint8)), dtype


def second_derivatives(rank: int, cp_size: int) -> str:
    group = subgroup(cp_size)
    if rank >= cp_size:
        return ""
    plan = magi.plan(masks.causal(24), group, SHAPE)
    q, k = (torch.randn(plan.dispatch.num_local_tokens, h, 4, requires_grad=True) for h in (2, 1))
    out, _ = magi.dist_attn(q, k, k, plan, group)
    (grad,) = torch.autograd.grad((out * out * q).sum(), q, create_graph=True)
    try:
        grad.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def after_a_disagreement(rank: int, cp_size: int) -> None:
    """Whoever handles the error goes on with the next batch: nothing stale is left."""
    group = subgroup(cp_size)
    if rank >= cp_size:
        return
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


def other_second_masks(rank: int, cp_size: int) -> str:
    """A mask that came without a dispatch call is compared when it is first used."""
    group = subgroup(cp_size)
    if rank >= cp_size:
        return ""
    config = MagiConfig(agreement_timeout_s=20)
    first = magi.plan(masks.causal(24), group, SHAPE, config)
    q, k = (magi.dispatch(torch.zeros(24, h, 4), first, group) for h in (2, 1))
    magi.dist_attn(q, k, k, first, group)
    window = masks.sliding_window(24, (7 if rank == 1 else 5, 0))
    plan = magi.plan(window, group, SHAPE, config, dispatch=first.dispatch)
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
