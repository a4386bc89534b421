"""Ranks that do different things: what each of them is told, and that they can go on."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_magi as magi
from megatron_magi import AgreementError, AttnPlan, HeadShape, MagiConfig, masks
from megatron_magi.core.runtime import agreement, agreement_channel, agreement_watcher
from megatron_magi.core.runtime.agreement_record import Call
from megatron_magi.core.runtime.max_logits import dist_max_logits
from tests.process_pool import subgroup

SHAPE = HeadShape(2, 1, 4)
CONFIG = MagiConfig(agreement_timeout_s=20)
TOKENS = 512

Action = Callable[[AttnPlan, AttnPlan, Any, bool], object]
"""(plan, another plan, group, whether this rank is the odd one)."""


def _tokens(plan: AttnPlan, group: Any, heads: int, **given: Any) -> torch.Tensor:
    return magi.dispatch(torch.randn(TOKENS, heads, 4, **given), plan, group)


def _qkv(plan: AttnPlan, group: Any, **given: Any) -> list[torch.Tensor]:
    return [_tokens(plan, group, heads, **given) for heads in (2, 1, 1)]


def undispatch_of_another_plan(plan: AttnPlan, other: AttnPlan, group: Any, odd: bool) -> None:
    x = torch.zeros(plan.layout.num_local_tokens, 1)
    magi.undispatch(x, other if odd else plan, group)


def gradient_of_another_batch(plan: AttnPlan, other: AttnPlan, group: Any, odd: bool) -> None:
    """Both plans were agreed on; the odd rank ends with the other one's batch."""
    magi.agree(plan, group), magi.agree(other, group)
    leaves = [torch.zeros(TOKENS, 1, requires_grad=True) for _ in range(2)]
    of_plan, of_other = (
        magi.dispatch(x, p, group) for x, p in zip(leaves, (plan, other), strict=True)
    )
    (of_other if odd else of_plan).sum().backward()


def roll_by_another_shift(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    magi.shift_tokens(_tokens(plan, group, 1), 2 if odd else 1, plan, group)


def roll_of_another_dtype(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    dtype = torch.float64 if odd else torch.float32
    magi.shift_tokens(_tokens(plan, group, 1, dtype=dtype), 1, plan, group)


def attention_of_another_scale(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    magi.dist_attn(*_qkv(plan, group), plan, group, softmax_scale=0.5 if odd else 0.25)


def attention_of_another_dtype(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    dtype = torch.float64 if odd else torch.float32
    magi.dist_attn(*_qkv(plan, group, dtype=dtype), plan, group)


def attention_of_other_heads(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    """Each rank's tensors fit its own plan, as where one of them has another model config."""
    heads = 2 if odd else 1
    own = magi.plan(plan.mask, group, HeadShape(2, heads, 4), CONFIG)
    q, k = _tokens(own, group, 2), _tokens(own, group, heads)
    magi.dist_attn(q, k, k, own, group)


def gradient_on_some_ranks(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    magi.dist_attn(*_qkv(plan, group, requires_grad=not odd), plan, group)


def largest_logits_of_another_scale(
    plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool
) -> None:
    q, k, _ = _qkv(plan, group)
    dist_max_logits(q, k, plan, group, 0.5 if odd else 0.25)


def another_call(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    q, k, v = _qkv(plan, group)
    if odd:
        magi.undispatch(q, plan, group)
    else:
        magi.dist_attn(q, k, v, plan, group)


def another_sum_of_gradients(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    magi.undispatch(_tokens(plan, group, 1), plan, group, is_partial_grad=odd)


def odd_rank(rank: int, cp_size: int, action: Action) -> str:
    """What a rank is told when the last one acts otherwise; then all of them go on."""
    group = subgroup(cp_size)
    if rank >= cp_size:
        return ""
    plan = magi.plan(masks.causal(TOKENS), group, SHAPE, CONFIG)
    documents = masks.from_cu_seqlens([0, 100, 300, TOKENS])
    other = magi.plan(documents, group, SHAPE, CONFIG)
    started = time.monotonic()
    try:
        action(plan, other, group, rank == cp_size - 1)
        said = "no error"
    except AgreementError as error:
        said = str(error)
    assert time.monotonic() - started < 15, "told within seconds"
    x = torch.arange(TOKENS * 1.0).unsqueeze(1)
    assert torch.equal(magi.undispatch(magi.dispatch(x, plan, group), plan, group), x)
    return said


def unequal_dispatches(rank: int, cp_size: int) -> None:
    """A batch that one rank dispatched and dropped shifts nothing."""
    group = subgroup(cp_size)
    if rank >= cp_size:
        return
    plans = [
        magi.plan(masks.from_cu_seqlens([0, cut, TOKENS]), group, SHAPE, CONFIG)
        for cut in (100, 200)
    ]
    for _ in range(2 if rank == 0 else 1):
        _tokens(plans[0], group, 1)
    for plan in plans * 2:
        x = torch.randn(TOKENS, 1, generator=torch.Generator().manual_seed(0))
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
        agreement.begin_comparing(plan, group)
        assert agreement._states[group].channel is not None
        magi.agree(plan, group)
    of_held, of_dropped = agreement._states[held], weakref.ref(agreement._states[dropped])
    dist.destroy_process_group(held), dist.destroy_process_group(dropped)
    del dropped, group
    gc.collect()
    magi.agree(plan, later)
    assert of_held.channel is None and of_dropped() is None
    assert agreement._states[later].channel is not None


def forked_child(rank: int, cp_size: int) -> int:
    """Exit code of a child that a rank forks, as for a tool of its own, and that ends normally."""
    group = subgroup(cp_size)
    if rank >= cp_size:
        return 0
    plan = magi.plan(masks.causal(TOKENS), group, SHAPE, CONFIG)
    magi.agree(plan, group)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a child that hangs is killed, and seen
        for state in list(agreement._states.values()):
            state.close()
        agreement._close_all()
        agreement_channel._leave_unfinished()
        gc.collect()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    magi.agree(plan, group)
    return code


def on_a_device(rank: int, cp_size: int) -> list[str]:
    """A GPU's exchanges do not wait, apart from a plan's first; the next one tells."""
    group = dist.new_group(list(range(cp_size)))
    if rank >= cp_size:
        return []
    device = torch.device("cuda", 0)
    plan = magi.plan(masks.causal(TOKENS), cp_size, SHAPE, CONFIG)
    said = []
    with mock.patch.object(agreement._watcher, "start"):
        first = agreement.compare(Call("undispatch"), plan, group, device)
        said.append(f"waits {first.must_wait}")
        first.wait()
        second = agreement.compare(Call("undispatch", extra=rank), plan, group, device)
        said.append(f"waits {second.must_wait}")
        second.wait()
        deadline = time.monotonic() + 10
        while not agreement._states[group].channel.is_ready() and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            agreement.compare(Call("undispatch"), plan, group, device)
        except AgreementError as error:
            said.append(str(error))
        agreement.compare(Call("undispatch"), plan, group, device).wait()
    return said


def many_on_a_device(rank: int, cp_size: int, num_calls: int) -> None:
    """As many buffers as comparisons that may be under way, however many calls there were."""
    group = dist.new_group(list(range(cp_size)))
    if rank >= cp_size:
        return
    plan = magi.plan(masks.causal(TOKENS), cp_size, SHAPE, CONFIG)
    with mock.patch.object(agreement, "MAX_PENDING", 8), \
         mock.patch.object(agreement._watcher, "start"):  # fmt: skip
        for _ in range(num_calls):
            agreement.compare(Call("undispatch"), plan, group, torch.device("cuda", 0))
        agreement.finish_agreement(group)
    channel = agreement._states[group].channel
    assert channel is not None and channel.num_sent == num_calls
    assert not channel.pending and len(channel.free) <= 8


def stuck_host(rank: int, world_size: int, store: str) -> None:
    """Two processes of which neither calls again: their watchers end them."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    plan = magi.plan(masks.causal(TOKENS), world_size, SHAPE, CONFIG)
    agreement_watcher.PERIOD_S, agreement_watcher.GRACE_S = 0.1, 0.3
    device, group = torch.device("cuda", 0), dist.group.WORLD
    agreement.compare(Call("undispatch"), plan, group, device).wait()
    agreement.compare(Call("shift_tokens" if rank else "undispatch"), plan, group, device).wait()
    time.sleep(60)


def start_stuck_host(rank: int, store: str) -> subprocess.Popen[str]:
    code = f"from tests.core.runtime.agreement_jobs import *; stuck_host({rank}, 2, {store!r})"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def every_exchange(rank: int, cp_size: int) -> dict[str, int]:
    """How many comparisons each call that exchanges rows begins, forward and backward."""
    group = subgroup(cp_size)
    if rank >= cp_size:
        return {}
    plan = magi.plan(masks.causal(TOKENS), group, SHAPE, CONFIG)
    magi.agree(plan, group)
    channel = agreement._states[group].channel
    assert channel is not None
    counts: dict[str, int] = {}

    def count(name: str, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        before = channel.num_sent
        result = call()
        counts[name] = channel.num_sent - before
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
    q, k, v = _qkv(plan, group, requires_grad=True)
    out = count("dist_attn", lambda: magi.dist_attn(q, k, v, plan, group)[0])
    count("backward of dist_attn", lambda: torch.autograd.grad(out.sum(), q)[0])
    return counts
