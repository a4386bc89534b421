"""Ranks that do different things: what each of them is told, and that they can go on."""

from __future__ import annotations

import gc
import os
import random
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
from megatron_magi.core.runtime import (
    agreement,
    agreement_channel,
    agreement_group,
    agreement_watcher,
)
from megatron_magi.core.runtime.agreement_signature import Call
from megatron_magi.core.runtime.dist_attn import dist_attn_and_max_logits
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
    magi.dist_attn(*_qkv(plan, group), plan, group, magi.Softmax(0.5 if odd else 0.25))


def attention_of_another_softcap(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    magi.dist_attn(*_qkv(plan, group), plan, group, magi.Softmax(softcap=50.0 if odd else 30.1))


def sinks_on_some_ranks(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    q, k, v = _qkv(plan, group)
    sink = None if odd else torch.zeros(1, q.shape[1])
    magi.dist_attn(q, k, v, plan, group, magi.Softmax(sink=sink))


def sinks_per_token_on_some_ranks(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    q, k, v = _qkv(plan, group)
    sink = torch.zeros(len(q) if odd else 1, 1, q.shape[1])
    magi.dist_attn(q, k, v, plan, group, magi.Softmax(sink=sink if odd else sink[0]))


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
    dist_attn_and_max_logits(*_qkv(plan, group), plan, group, magi.Softmax(0.5 if odd else 0.25))


def largest_logits_on_some_ranks(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    attention = magi.dist_attn if odd else dist_attn_and_max_logits
    attention(*_qkv(plan, group), plan, group)


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
        while not agreement._look_at_all() and time.monotonic() < deadline:
            time.sleep(0.01)  # as the watcher does, which sends what is no whole batch
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
    with mock.patch.object(agreement_group, "MAX_PENDING", 8), \
         mock.patch.object(agreement._watcher, "start"):  # fmt: skip
        for _ in range(num_calls):
            agreement.compare(Call("undispatch"), plan, group, torch.device("cuda", 0))
        agreement.finish_agreement(group)
    channel = agreement._states[group].channel
    assert channel is not None and channel.streams.num_calls == num_calls
    assert not channel.pending and len(channel.free) <= 8


def early_watchers(rank: int, cp_size: int, odd_call: int, seed: int) -> str:
    """Calls of a device while watchers look at moments of their own; all ranks wait together."""
    group = dist.new_group(list(range(cp_size)))
    if rank >= cp_size:
        return ""
    plan = magi.plan(masks.causal(TOKENS), cp_size, SHAPE, CONFIG)
    common, own = random.Random(seed), random.Random(seed * 10 + rank)
    device = torch.device("cuda", 0)
    try:
        with mock.patch.object(agreement._watcher, "start"):
            for i in range(150):
                shift = 1 + (rank == cp_size - 1 and i == odd_call)
                agreement.compare(Call("shift_tokens", extra=shift), plan, group, device).wait()
                if common.random() < 0.05:
                    agreement.finish_agreement(group)
                if own.random() < 0.1:
                    agreement._look_at_all()
                if own.random() < 0.02:
                    time.sleep(0.02)
            agreement.finish_agreement(group)
    except AgreementError as error:
        return str(error)
    channel = agreement._states[group].channel
    assert channel is not None and not channel.pending
    assert channel.streams.lengths == [150] * cp_size
    return "no error"


def waits_alone(rank: int, cp_size: int) -> float:
    """Seconds that rank 0 waits for ranks that are busy elsewhere, and whose watchers answer."""
    group = dist.new_group(list(range(cp_size)))
    if rank >= cp_size:
        return 0
    plan = magi.plan(masks.causal(TOKENS), cp_size, SHAPE, CONFIG)
    for _ in range(20 + min(rank, 1)):  # the others are one call ahead
        agreement.compare(Call("shift_tokens"), plan, group, torch.device("cuda", 0)).wait()
    started = time.monotonic()
    if rank == 0:
        agreement.finish_agreement(group)
    took = time.monotonic() - started
    if rank == 0:
        agreement.compare(Call("shift_tokens"), plan, group, torch.device("cuda", 0))
    time.sleep(5 - took)
    agreement.finish_agreement(group)
    return took


def ends_before_another(rank: int, cp_size: int) -> list[str]:
    """Rank 0 drops a group of which not everything was sent; what the watchers of all say then."""
    group = dist.new_group(list(range(cp_size)))
    if rank >= cp_size:
        return []
    plan = magi.plan(masks.causal(TOKENS), cp_size, SHAPE, CONFIG)
    for _ in range(4):
        agreement.compare(Call("shift_tokens"), plan, group, torch.device("cuda", 0)).wait()
    channel = agreement._states[group].channel
    assert channel is not None
    dist.destroy_process_group(group) if rank == 0 else None
    if rank == 0:
        del group
        gc.collect()
    time.sleep(3)
    assert channel.streams.lengths == [4] * cp_size
    assert (channel.group is None) == (rank == 0)
    return agreement._look_at_all()


def host_that_ends(rank: int, world_size: int, store: str) -> None:
    """Rank 0 ends after its last call; the other one has work to do after that."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    plan = magi.plan(masks.causal(TOKENS), world_size, SHAPE, CONFIG)
    agreement_watcher.GRACE_S = 0.3
    for _ in range(4):
        compared = agreement.compare(
            Call("shift_tokens"), plan, dist.group.WORLD, torch.device("cuda", 0)
        )
        compared.wait()
    time.sleep(4 * rank)


def stuck_host(rank: int, world_size: int, store: str) -> None:
    """Two processes of which neither calls again: their watchers end them."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    plan = magi.plan(masks.causal(TOKENS), world_size, SHAPE, CONFIG)
    agreement_watcher.PERIOD_S, agreement_watcher.GRACE_S = 0.1, 0.3
    device, group = torch.device("cuda", 0), dist.group.WORLD
    agreement.compare(Call("undispatch"), plan, group, device).wait()
    agreement.compare(Call("shift_tokens" if rank else "undispatch"), plan, group, device).wait()
    time.sleep(60)


def start_host(job: Callable[..., None], rank: int, store: str) -> subprocess.Popen[str]:
    call = f"{job.__name__}({rank}, 2, {store!r})"
    code = f"from tests.core.runtime.agreement_jobs import *; {call}"
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
    q, k, v = _qkv(plan, group, requires_grad=True)
    out = count("dist_attn", lambda: magi.dist_attn(q, k, v, plan, group)[0])
    count("backward of dist_attn", lambda: torch.autograd.grad(out.sum(), q)[0])
    return counts
