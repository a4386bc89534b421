"""Ranks whose calls run on a device: comparisons are not waited for, and watchers finish them."""

from __future__ import annotations

import atexit
import gc
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_magi as magi
from megatron_magi import AgreementError, masks
from megatron_magi.core.runtime.agreement import comparison
from megatron_magi.core.runtime.agreement import group as group_module
from megatron_magi.core.runtime.agreement import watcher as watcher_module
from megatron_magi.core.runtime.agreement.signature import Call
from tests.core.runtime.agreement.actions import CONFIG, SHAPE, TOKENS
from tests.process_pool import forking_context


def on_a_device(rank: int, cp_size: int) -> list[str]:
    """A GPU's exchanges do not wait, apart from a plan's first; the next one tells."""
    group = dist.new_group(list(range(cp_size)))
    if rank >= cp_size:
        return []
    device = torch.device("cuda", 0)
    plan = magi.plan(masks.causal(TOKENS), cp_size, SHAPE, CONFIG)
    said = []
    with mock.patch.object(comparison._watcher, "start"):
        first = comparison.compare(Call("undispatch"), plan, group, device)
        said.append(f"waits {first.must_wait}")
        first.wait()
        second = comparison.compare(Call("undispatch", extra=rank), plan, group, device)
        said.append(f"waits {second.must_wait}")
        second.wait()
        deadline = time.monotonic() + 10
        while not comparison._look_at_all() and time.monotonic() < deadline:
            time.sleep(0.01)  # as the watcher does, which sends what is no whole batch
        try:
            comparison.compare(Call("undispatch"), plan, group, device)
        except AgreementError as error:
            said.append(str(error))
        comparison.compare(Call("undispatch"), plan, group, device).wait()
    return said


def many_on_a_device(rank: int, cp_size: int, num_calls: int) -> None:
    """As many buffers as comparisons that may be under way, however many calls there were."""
    group = dist.new_group(list(range(cp_size)))
    if rank >= cp_size:
        return
    plan = magi.plan(masks.causal(TOKENS), cp_size, SHAPE, CONFIG)
    with mock.patch.object(group_module, "MAX_PENDING", 8), \
         mock.patch.object(comparison._watcher, "start"):  # fmt: skip
        for _ in range(num_calls):
            comparison.compare(Call("undispatch"), plan, group, torch.device("cuda", 0))
        comparison.finish_agreement(group)
    channel = comparison._states[group].channel
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
        with mock.patch.object(comparison._watcher, "start"):
            for i in range(150):
                shift = 1 + (rank == cp_size - 1 and i == odd_call)
                comparison.compare(Call("shift_tokens", extra=shift), plan, group, device).wait()
                if common.random() < 0.05:
                    comparison.finish_agreement(group)
                if own.random() < 0.1:
                    comparison._look_at_all()
                if own.random() < 0.02:
                    time.sleep(0.02)
            comparison.finish_agreement(group)
    except AgreementError as error:
        return str(error)
    channel = comparison._states[group].channel
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
        comparison.compare(Call("shift_tokens"), plan, group, torch.device("cuda", 0)).wait()
    started = time.monotonic()
    if rank == 0:
        comparison.finish_agreement(group)
    took = time.monotonic() - started
    if rank == 0:
        comparison.compare(Call("shift_tokens"), plan, group, torch.device("cuda", 0))
    time.sleep(5 - took)
    comparison.finish_agreement(group)
    return took


def ends_before_another(rank: int, cp_size: int) -> list[str]:
    """Rank 0 drops a group of which not everything was sent; what the watchers of all say then."""
    group = dist.new_group(list(range(cp_size)))
    if rank >= cp_size:
        return []
    plan = magi.plan(masks.causal(TOKENS), cp_size, SHAPE, CONFIG)
    for _ in range(4):
        comparison.compare(Call("shift_tokens"), plan, group, torch.device("cuda", 0)).wait()
    channel = comparison._states[group].channel
    assert channel is not None
    dist.destroy_process_group(group) if rank == 0 else None
    if rank == 0:
        del group
        gc.collect()
    time.sleep(3)
    assert channel.streams.lengths == [4] * cp_size
    assert (channel.group is None) == (rank == 0)
    return comparison._look_at_all()


def host_that_ends(rank: int, world_size: int, store: str) -> None:
    """Rank 0 ends after its last call; the other one has work to do after that."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    plan = magi.plan(masks.causal(TOKENS), world_size, SHAPE, CONFIG)
    watcher_module.PERIOD_S, watcher_module.GRACE_S = 0.1, 0.3
    for _ in range(4):
        compared = comparison.compare(
            Call("shift_tokens"), plan, dist.group.WORLD, torch.device("cuda", 0)
        )
        compared.wait()
    time.sleep(1.5 * rank)


def stuck_host(rank: int, world_size: int, store: str) -> None:
    """Two processes of which neither calls again: their watchers end them."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    plan = magi.plan(masks.causal(TOKENS), world_size, SHAPE, CONFIG)
    watcher_module.PERIOD_S, watcher_module.GRACE_S = 0.1, 0.3
    device, group = torch.device("cuda", 0), dist.group.WORLD
    comparison.compare(Call("undispatch"), plan, group, device).wait()
    comparison.compare(Call("shift_tokens" if rank else "undispatch"), plan, group, device).wait()
    time.sleep(60)


def ends_of_hosts(job: Callable[..., None], folder: Path) -> list[tuple[int | None, str]]:
    """Exit codes of two ranks, and what they have written to standard error."""
    logs = [folder / f"{rank}.log" for rank in range(2)]
    hosts = [
        forking_context().Process(
            target=_host, args=(job, str(log), rank, 2, str(folder / "store"))
        )
        for rank, log in enumerate(logs)
    ]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join(50)
        host.kill()
    return [(host.exitcode, log.read_text()) for host, log in zip(hosts, logs, strict=True)]


def _host(job: Callable[..., None], log: str, *given: Any) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    job(*given)
    atexit._run_exitfuncs()  # multiprocessing leaves them out
