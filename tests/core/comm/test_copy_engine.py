"""Exchanges by copy engine: every interleaving of the ranks' streams brings the right rows."""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_magi.core.comm import copy_engine
from megatron_magi.core.comm.symmetric_memory import FLAGS_BYTES, NUM_SLOTS, SymmetricMemory
from megatron_magi.core.comm.transport import PendingRecv, PendingSend, RowCounts
from megatron_magi.core.plan.peer_rows import peer_starts
from tests.core.comm.queued_ranks import COLUMNS, Ranks, flag


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 5), st.integers(1, 9), st.integers(0, 4), st.integers(0, 10**9))
def test_rows_arrive_in_any_order_of_events(
    count: int, num_exchanges: int, late: int, seed: int
) -> None:
    """Exchanges of random rows, some empty; a rank waits for each one up to ``late`` later."""
    rng, order = np.random.default_rng(seed), random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        ranks = Ranks(count, patch)
        checked: list[int] = []
        matrices = [rng.integers(0, 4, (count, count)) * (rng.random() < 0.8)
                    for _ in range(num_exchanges)]  # fmt: skip
        for ranks.rank in range(count):
            pending: deque[Callable[[], None]] = deque()
            for number, rows in enumerate(matrices):
                pending.append(begin(ranks, number, rows * (1 - np.eye(count, dtype=int)), checked))
                while len(pending) > late:
                    pending.popleft()()
            while pending:
                pending.popleft()()
        ranks.streams.run(order)
        assert len(checked) == count * num_exchanges
        for engine in ranks.engines:
            assert len(engine._under_way) == num_exchanges, "the host ran ahead of everything"
            engine._collect()
            assert not engine._under_way and len(engine._events) == num_exchanges


def begin(ranks: Ranks, number: int, rows: np.ndarray, checked: list[int]) -> Callable[[], None]:
    """Begin an exchange on ``ranks.rank``; the result waits for it and checks what has arrived."""
    me, streams = ranks.rank, ranks.streams
    recv = torch.zeros(int(rows[:, me].sum()), COLUMNS)
    send = send_gathered if number % 2 else send_filled
    work = send(ranks, number, rows, recv)

    def finish() -> None:
        work.wait()
        streams.add(ranks.current, lambda: check(recv, number, rows, me, checked))

    return finish


def send_filled(ranks: Ranks, number: int, rows: np.ndarray, recv: Tensor) -> PendingRecv:
    """Rows that a kernel writes into the slot, behind some that are not sent."""
    me, engine = ranks.rank, ranks.engines[ranks.rank]
    first, num_rows = number % 3, int(rows[me].sum())
    room = engine.room(torch.empty(0), first + num_rows, [torch.Size([COLUMNS])], torch.float32)
    ranks.streams.add(ranks.current, lambda: room[first:].copy_(rows_of(number, me, num_rows)))
    return engine.exchange(room[first:], recv, counts_of(rows, me), first)


def send_gathered(ranks: Ranks, number: int, rows: np.ndarray, recv: Tensor) -> PendingSend:
    """Rows of two tensors, in reverse order, gathered by the library."""
    me, engine, num_rows = ranks.rank, ranks.engines[ranks.rank], int(rows[ranks.rank].sum())
    index = torch.arange(num_rows, dtype=torch.int32).flip(0)
    xs = [x.contiguous() for x in rows_of(number, me, num_rows).flip(0).chunk(2, 1)]
    ranks.streams.kept.append((index, xs))  # the library gets addresses
    return engine.send_rows(xs, index, recv, counts_of(rows, me))


def rows_of(number: int, rank: int, count: int) -> Tensor:
    """Rows that say which exchange, whose and which row they are, in both halves."""
    half = torch.tensor([[number, rank, row, -1.0] for row in range(count)]).reshape(count, 4)
    return torch.cat([half, -half], 1)


def counts_of(rows: np.ndarray, rank: int) -> RowCounts:
    pairs = [(0, d, s, 0, int(n)) for (s, d), n in np.ndenumerate(rows)]
    starts = peer_starts(np.array(pairs, np.int32), len(rows), rank)
    return RowCounts(rows[rank].tolist(), rows[:, rank].tolist(), list(starts.sent))


def check(recv: Tensor, number: int, rows: np.ndarray, me: int, checked: list[int]) -> None:
    parts = [
        rows_of(number, src, int(rows[src].sum()))[int(rows[src, :me].sum()) :][: rows[src, me]]
        for src in range(len(rows))
    ]
    assert torch.equal(recv, torch.cat(parts)), (number, me)
    checked.append(me)


def test_a_slot_is_not_filled_before_the_peers_have_read_it(patch: pytest.MonkeyPatch) -> None:
    """A rank that runs ahead waits on its stream for the slot, and the slow rank gets its rows."""
    ranks, checked = Ranks(2, patch), []
    rows = np.array([[0, 3], [2, 0]])
    for ranks.rank in range(2):
        for number in range(NUM_SLOTS + 2):
            begin(ranks, number, rows, checked)()
    fast = ranks.streams
    slow = fast.queues.pop(2), fast.queues.pop(1001)
    with pytest.raises(AssertionError, match="every stream waits"):
        fast.run(random.Random(0))
    assert flag(ranks.engines[1].memory.flags[0].ready_here).value == 1
    fast.queues[2], fast.queues[1001] = slow
    fast.run(random.Random(0))
    assert len(checked) == 2 * (NUM_SLOTS + 2)


def test_received_rows_are_let_go_when_a_stream_waits_for_them(
    patch: pytest.MonkeyPatch,
) -> None:
    """The host enqueues many exchanges before the device runs the first; none may keep memory that
    only streams still use."""
    ranks, rows = Ranks(2, patch), np.array([[0, 3], [2, 0]])
    held = []
    for number in range(8):
        recv = torch.zeros(2, COLUMNS, dtype=torch.float32)
        held.append(weakref.ref(recv))
        send = ranks.engines[0].room(recv, 3, [recv.shape[1:]], recv.dtype)
        copies = ranks.engines[0].exchange(send, recv, counts_of(rows, 0))
        if number < 7:
            copies.wait()
        del recv, send, copies
    assert [each() is None for each in held] == [True] * 7 + [False]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(0, 10**9))
def test_events_are_used_again_when_their_exchange_has_ended(count: int, seed: int) -> None:
    """Hosts that keep pace with their devices need few events, and every row still arrives."""
    rng, order = np.random.default_rng(seed), random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        ranks, checked = Ranks(count, patch), []
        for number in range(12):
            rows = rng.integers(0, 4, (count, count)) * (1 - np.eye(count, dtype=int))
            for ranks.rank in range(count):
                begin(ranks, number, rows, checked)()
            if order.random() < 0.7:
                ranks.streams.run(order)
        ranks.streams.run(order)
        assert len(checked) == 12 * count
        made = {x.filled.cuda_event for engine in ranks.engines for x in engine._under_way}
        assert len(made) <= 12 * count


def test_an_exchange_that_nobody_waits_for_is_let_go(patch: pytest.MonkeyPatch) -> None:
    """After an error; its events are not used again, because a wait might still come."""
    ranks, rows = Ranks(2, patch), 1 - np.eye(2, dtype=int)
    for ranks.rank in range(2):
        begin(ranks, 0, rows, [])
    ranks.streams.run(random.Random(0))
    for engine in ranks.engines:
        (dropped,) = engine._under_way
        engine._collect()
        assert not engine._under_way and dropped.recv is None and not engine._events


def test_a_watcher_hears_of_a_rank_that_does_not_come(patch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(3, patch)
    now = 0.0
    patch.setattr(copy_engine.time, "monotonic", lambda: now)
    patch.setattr(SymmetricMemory, "numbers", numbers_on_host)
    rows = 1 - np.eye(3, dtype=int)
    engine = ranks.engines[0]
    assert engine.overdue(10) is None
    for ranks.rank in (0, 1):  # rank 2 never comes
        begin(ranks, 0, rows, [])()
    assert engine.overdue(10) is None
    now = 100.0  # the device has had other work until now
    assert engine.overdue(10) is None
    with pytest.raises(AssertionError, match="every stream waits"):
        ranks.streams.run(random.Random(0))
    assert engine.overdue(10) is None, "the clock begins when this rank's rows lie ready"
    now = 109.0
    assert engine.overdue(10) is None
    now = 111.0
    text = engine.overdue(10)
    assert text is not None and "rank(s) [2] of the group have not begun exchange 1" in text
    ranks.rank = 2
    begin(ranks, 0, rows, [])()
    ranks.streams.run(random.Random(0))
    now = 200.0
    assert engine.overdue(10) is None


def test_a_report_does_not_wait_for_a_stuck_device(patch: pytest.MonkeyPatch) -> None:
    ranks, stuck = Ranks(2, patch), threading.Event()
    patch.setattr(SymmetricMemory, "numbers", lambda memory: stuck.wait(60) and {})
    patch.setattr(copy_engine, "READ_S", 0.05)
    ranks.rank = 0
    begin(ranks, 0, 1 - np.eye(2, dtype=int), [])()
    with pytest.raises(AssertionError, match="every stream waits"):
        ranks.streams.run(random.Random(0))
    assert ranks.engines[0].overdue(0) is None
    text = ranks.engines[0].overdue(0)
    stuck.set()
    assert text is not None and "some rank of the group has not begun exchange 1" in text


def numbers_on_host(memory: SymmetricMemory) -> dict[int, tuple[int, int]]:
    flags = memory.buffer[:FLAGS_BYTES].view(torch.int32).tolist()
    return {peer: (flags[2 * peer], flags[2 * peer + 1]) for peer in memory.peers}
