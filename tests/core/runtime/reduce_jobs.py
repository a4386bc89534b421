"""What the tests of reduces with a communicator of their own run on every rank."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_magi as magi
from megatron_magi import MagiConfig, masks
from megatron_magi.core.comm import reduce_group as module
from megatron_magi.core.comm.group_cast import PendingCast, group_cast
from megatron_magi.core.comm.reduce_group import ReduceGroup, reduce_group, share_communicator
from megatron_magi.core.comm.transport import AllToAll
from megatron_magi.core.comm.transport_choice import CASTS_BEHIND_REDUCES
from tests.core.runtime.runtime_jobs import (
    NAMED,
    SHAPE,
    check_against_dense,
    run_attention,
    staged,
)
from tests.process_pool import on_subgroup, subgroup

CPU = torch.device("cpu")
MASKS = {
    "full": masks.full(350),
    "causal": masks.causal(400),
    "packed": masks.from_cu_seqlens([0, 5, 200, 201, 320, 450]),
    "window": masks.from_cu_seqlens([0, 250, 450], window_size=(85, 0)),
    "shared question": masks.shared_question([150, 45], [[100, 55, 25], [40]]),
}
"""Of so many tiles that a backward has as many stages as it is asked for."""


def tiled(degree: int | str, **how: Any) -> MagiConfig:
    return staged(degree, tile_q=16, tile_k=16, **how)


def opened(group: Any) -> bool:
    """Whether reduces of the group have a communicator of their own."""
    return any(module._opened.get(group, {}).values())


def both_ways(rank: int, cp_size: int, degree: int | str, nodes: int) -> None:
    """With one communicator and with two: equal bits, and the dense answer."""
    ranks = list(range(cp_size))
    shared, own = dist.new_group(ranks), dist.new_group(ranks)
    if rank >= cp_size:
        return
    share_communicator(shared)
    how = {"ranks_per_node": cp_size // nodes} if nodes > 1 else {}
    config = tiled(degree, **how)
    for mask in (MASKS["packed"], MASKS["shared question"], NAMED["sees nothing"]):
        one, two = (
            run_attention(mask, config, group, torch.bfloat16, 3)[0] for group in (shared, own)
        )
        assert all(torch.equal(one[x], two[x]) for x in one)
        check_against_dense(mask, config, own, torch.float64, 4)
    assert not opened(shared)
    assert opened(own) == (isinstance(degree, int) and degree >= CASTS_BEHIND_REDUCES)


@contextmanager
def recorded(begun: list[str]) -> Iterator[None]:
    """Names every exchange that this rank begins: its communicator; and every wait for keys."""
    exchange, wait = AllToAll.exchange, PendingCast.wait

    def named(self: AllToAll, *args: Any, **kwargs: Any) -> Any:
        begun.append("cast" if self.communicator is None else "reduce")
        return exchange(self, *args, **kwargs)

    def waiting(self: PendingCast) -> Any:
        begun.append("wait")
        return wait(self)

    named_wait = mock.patch.object(PendingCast, "wait", waiting)
    with mock.patch.object(AllToAll, "exchange", named), named_wait:
        yield


@on_subgroup
def order_of_exchanges(
    rank: int, group: Any, degree: int, name: str, can_delay_send: bool = True
) -> list[str]:
    """What a rank begins in one backward, in its order. Sends cannot be delayed where rows lie in
    slots of symmetric memory."""
    plan = magi.plan(MASKS[name], group, SHAPE, tiled(degree))
    rows = plan.layout.num_local_tokens
    q, k = (torch.randn(rows, h, 8, requires_grad=True) for h in (4, 2))
    out, _ = magi.dist_attn(q, k, k, plan, group)
    begun: list[str] = []
    delayed = mock.patch.object(AllToAll, "can_delay_send", can_delay_send)
    with recorded(begun), delayed:
        out.sum().backward()
    assert opened(group)
    return begun


def without_a_fourth_cast(rank: int, cp_size: int) -> None:
    """Kept keys are not fetched again, and three casts begin before the first reduce."""
    group = dist.new_group(list(range(cp_size)))
    if rank >= cp_size:
        return
    for config in (tiled(5, keep_received_keys=True), tiled(3)):
        check_against_dense(MASKS["packed"], config, group, torch.float64, 5)
    assert not opened(group)


def subsets(rank: int, world_size: int) -> None:
    """As with tensor and context parallelism together: groups that cross, ranks that are in
    different numbers of groups, and a group whose ranks alone do anything."""
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    more = dist.new_group([0])  # group names that count groups would differ from here on
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    if rank < 4:
        for group in (rows[rank // 2], columns[rank % 2]):
            check_against_dense(MASKS["causal"], tiled(4), group, torch.float64, 4)
            assert opened(group)
    if rank in (2, 3):
        check_against_dense(MASKS["full"], tiled(5), rows[1], torch.float64, 1)
    assert rank > 0 or not opened(more)


def ends_with_its_parent(rank: int, world_size: int) -> None:
    """A group that is destroyed takes its communicator along, and the next one opens another. All
    ranks: torch.distributed names later groups wrongly if some of them have destroyed a group."""
    ranks = list(range(world_size))
    held, dropped = dist.new_group(ranks), dist.new_group(ranks)
    made = [reduce_group(group, CPU, 20.0) for group in (held, dropped)]
    assert all(x is not None and x.backend is not None for x in made)
    assert made[0] is reduce_group(held, CPU, 20.0) is not made[1]
    for group in (held, dropped):
        dist.destroy_process_group(group)
    del dropped, group
    gc.collect()
    assert len([x for x in module._opened if x is not held]) == len(module._opened) - 1
    # One that is opened looks for those whose parents have ended.
    reduce_group(dist.new_group(ranks), CPU, 20.0)
    assert made[0] is not None and made[0].backend is None


@on_subgroup
def forked_child(rank: int, group: Any) -> int:
    """Exit code of a child that a rank forks and that ends normally."""
    made = reduce_group(group, CPU, 20.0)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a child that hangs is killed, and seen
        module._leave_all()
        gc.collect()
        os._exit(0 if made is not None and made.backend is None else 3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    check_against_dense(MASKS["packed"], tiled(4), group, torch.float64, 6)
    return code


def fails_in_a_reduce(rank: int, cp_size: int, what: str) -> tuple[str, float]:
    """The last rank dies or hangs where its second reduce would begin; the error of the others, and
    seconds until it came."""
    group = dist.new_group(list(range(cp_size)), timeout=timedelta(seconds=4))
    plan = magi.plan(MASKS["causal"], group, SHAPE, tiled(4))
    rows = plan.layout.num_local_tokens
    q, k = (torch.randn(rows, h, 8, requires_grad=True) for h in (4, 2))
    magi.dist_attn(q, k, k, plan, group)[0].sum().backward()
    out, _ = magi.dist_attn(q, k, k, plan, group)
    with at_reduce(1, WAYS[what]) if rank == cp_size - 1 else mock.patch.object(module, "atexit"):
        began = time.monotonic()
        try:
            out.sum().backward()
        except RuntimeError as error:
            return str(error), time.monotonic() - began
    return "no error", time.monotonic() - began


WAYS: dict[str, Callable[[], object]] = {
    "dies": lambda: os._exit(7),
    "hangs": lambda: time.sleep(9),
}


@contextmanager
def at_reduce(number: int, act: Callable[[], object]) -> Iterator[None]:
    count, home = iter(range(100)), ReduceGroup.all_to_all

    def acting(self: ReduceGroup, *args: Any) -> Any:
        if next(count) == number:
            act()
        return home(self, *args)

    with mock.patch.object(ReduceGroup, "all_to_all", acting):
        yield


def absent_at_the_opening(rank: int, cp_size: int) -> str:
    """The error of ranks whose last one does not open the communicator."""
    group = dist.new_group(list(range(cp_size)))
    if rank == cp_size - 1:
        time.sleep(4)
        return ""
    try:
        reduce_group(group, CPU, 2.0)
    except RuntimeError as error:
        return str(error)
    return "no error"


def casts_and_reduces_at_once(rank: int, cp_size: int) -> None:
    """Exchanges of both communicators under way together, waited for in another order."""
    from megatron_magi.core.comm.prepared_cast import prepare_casts

    group = subgroup(cp_size)
    if rank >= cp_size:
        return
    plan = magi.plan(MASKS["full"], group, SHAPE, tiled(1))
    stage = plan.rank_plan(rank).stages[1]
    assert stage.cast is not None
    (cast,) = prepare_casts([stage.cast], CPU)
    x = torch.full((plan.layout.num_local_tokens, 3), float(rank))
    plain, own = AllToAll(group), AllToAll(group, reduce_group(group, CPU, 20.0))
    pending = [group_cast([x + 10 * i], cast, way) for i, way in enumerate((plain, own) * 4)]
    for i, one in reversed(list(enumerate(pending))):
        (rows,) = one.wait()
        sources = sorted({int(v) - 10 * i for v in rows[cast.num_own :, 0]})
        assert sources == [other for other in range(cp_size) if other != rank]
