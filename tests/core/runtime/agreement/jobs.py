"""Ranks that do different things: what each of them is told, and that they can go on."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import megatron_magi as magi
from megatron_magi import AgreementError, masks
from megatron_magi.core.runtime.agreement import channel as channel_module
from megatron_magi.core.runtime.agreement import comparison
from tests.core.runtime.agreement.actions import CONFIG, SHAPE, TOKENS, Action, qkv, tokens
from tests.process_pool import on_subgroup


@on_subgroup
def odd_rank(rank: int, group: Any, action: Action) -> str:
    """What a rank is told when the last one acts otherwise; then all of them go on."""
    plan = magi.plan(masks.causal(TOKENS), group, SHAPE, CONFIG)
    documents = masks.from_cu_seqlens([0, 100, 300, TOKENS])
    other = magi.plan(documents, group, SHAPE, CONFIG)
    started = time.monotonic()
    try:
        action(plan, other, group, rank == group.size() - 1)
        said = "no error"
    except AgreementError as error:
        said = str(error)
    assert time.monotonic() - started < 15, "told within seconds"
    x = torch.arange(TOKENS * 1.0).unsqueeze(1)
    assert torch.equal(magi.undispatch(magi.dispatch(x, plan, group), plan, group), x)
    return said


@on_subgroup
def unequal_dispatches(rank: int, group: Any) -> None:
    """A batch that one rank dispatched and dropped shifts nothing."""
    plans = [
        magi.plan(masks.from_cu_seqlens([0, cut, TOKENS]), group, SHAPE, CONFIG)
        for cut in (100, 200)
    ]
    for _ in range(2 if rank == 0 else 1):
        tokens(plans[0], group, 1)
    for plan in plans * 2:
        x = torch.randn(TOKENS, 1, generator=torch.Generator().manual_seed(0))
        assert torch.equal(magi.undispatch(magi.dispatch(x, plan, group), plan, group), x)


def inference_first(rank: int, cp_size: int) -> None:
    """Training follows an evaluation that was the first to compare."""
    group = dist.new_group(list(range(cp_size)))
    if rank >= cp_size:
        return
    plan = magi.plan(masks.causal(TOKENS), group, SHAPE, CONFIG)
    x = torch.arange(TOKENS * 1.0).unsqueeze(1)
    for mode in (torch.inference_mode, torch.enable_grad, torch.inference_mode):
        with mode():
            assert torch.equal(magi.undispatch(magi.dispatch(x, plan, group), plan, group), x)


def groups_of_the_same_ranks(rank: int, cp_size: int) -> None:
    """Used first from threads, in another order on every rank."""
    groups = [dist.new_group(list(range(cp_size))) for _ in range(4)]
    if rank >= cp_size:
        return
    plans = [
        magi.plan(masks.from_cu_seqlens([0, 100 + 50 * i, TOKENS]), cp_size, SHAPE, CONFIG)
        for i in range(len(groups))
    ]
    errors: list[Exception] = []

    def use(i: int) -> None:
        time.sleep(0.05 * ((i + 2 * rank) % len(groups)))
        try:
            for _ in range(3):
                magi.agree(plans[i], groups[i])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def ends_with_its_group(rank: int, cp_size: int) -> None:
    """The channel ends when the group is destroyed and another one is used, held or not."""
    held, dropped = (dist.new_group(list(range(cp_size))) for _ in range(2))
    later = dist.new_group(list(range(cp_size)))
    if rank >= cp_size:
        return
    plan = magi.plan(masks.causal(TOKENS), cp_size, SHAPE, CONFIG)
    for group in (held, dropped):
        comparison.begin_comparing(plan, group)
        assert comparison._states[group].channel is not None
        magi.agree(plan, group)
    of_held, of_dropped = comparison._states[held], weakref.ref(comparison._states[dropped])
    dist.destroy_process_group(held), dist.destroy_process_group(dropped)
    del dropped, group
    gc.collect()
    magi.agree(plan, later)
    assert of_held.channel is None and of_dropped() is None
    assert comparison._states[later].channel is not None


@on_subgroup
def forked_child(rank: int, group: Any) -> int:
    """Exit code of a child that a rank forks, as for a tool of its own, and that ends normally."""
    plan = magi.plan(masks.causal(TOKENS), group, SHAPE, CONFIG)
    magi.agree(plan, group)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a child that hangs is killed, and seen
        for state in list(comparison._states.values()):
            state.close()
        comparison._close_all()
        channel_module._leave_unfinished()
        gc.collect()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    magi.agree(plan, group)
    return code


@on_subgroup
def every_exchange(rank: int, group: Any) -> dict[str, int]:
    """How many comparisons each call that exchanges rows begins, forward and backward."""
    plan = magi.plan(masks.causal(TOKENS), group, SHAPE, CONFIG)
    magi.agree(plan, group)
    channel = comparison._states[group].channel
    assert channel is not None
    counts: dict[str, int] = {}

    def count(name: str, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        before = channel.streams.num_calls
        result = call()
        counts[name] = channel.streams.num_calls - before
        return result

    x = torch.randn(TOKENS, 1, 4, requires_grad=True)
    local = count("dispatch", lambda: magi.dispatch(x, plan, group))
    shifted = count("shift_tokens", lambda: magi.shift_tokens(local, 1, plan, group))
    whole = count("undispatch", lambda: magi.undispatch(shifted, plan, group, is_partial_grad=True))
    (grad,) = torch.autograd.grad(whole.sum(), shifted, retain_graph=True)
    count("backward of undispatch", lambda: torch.autograd.grad(
        whole.sum(), shifted, retain_graph=True)[0])  # fmt: skip
    count("backward of shift_tokens", lambda: torch.autograd.grad(
        shifted, local, grad, retain_graph=True)[0])  # fmt: skip
    count("backward of dispatch", lambda: torch.autograd.grad(local, x, torch.ones_like(local))[0])
    q, k, v = qkv(plan, group, requires_grad=True)
    out = count("dist_attn", lambda: magi.dist_attn(q, k, v, plan, group)[0])
    count("backward of dist_attn", lambda: torch.autograd.grad(out.sum(), q)[0])
    return counts
