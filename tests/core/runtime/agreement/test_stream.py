"""Ranks whose calls are equal never wait for ever, and a difference is found on every rank.

The ranks take turns in one process, in an order that hypothesis draws: the channel is the real one,
and gathers end when every rank has started them.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.core.runtime.agreement.signature import SIGNATURE_LEN
from megatron_magi.core.runtime.agreement.stream import BATCH, BLOCK_SHAPE, Streams
from tests.core.runtime.agreement.gathers import Gloo, channel_of

MOST_PENDING = 2  # few, so that ranks often wait for the oldest gather
PATIENCE = 400  # turns of every rank, far more than are needed

CALL, NEW_PLAN, FINISH, DEVICE = "call", "new plan", "finish", "wait for the device"
EVENTS = st.lists(st.sampled_from([CALL] * 12 + [NEW_PLAN, FINISH, DEVICE]), max_size=80)
TURNS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["step", "step", "look"])))


class Rank:
    """A program and a watcher, as ``agreement`` runs them, one small step at a time."""

    def __init__(self, gloo: Gloo, rank: int, events: list[str], odd_call: int = -1) -> None:
        self.channel, self.events = channel_of(gloo, rank), deque(events)
        self.odd_call, self.told = odd_call, -1
        self.holds_lock = False
        self.is_waiting = False

    @property
    def num_calls(self) -> int:
        return self.channel.streams.num_calls

    def is_done(self) -> bool:
        return self.told >= 0 or not (self.events or self.is_waiting)

    def step(self, ranks: list[Rank]) -> None:
        if self.is_done():
            return
        if self.is_waiting:
            self._wait()
        elif self.events[0] == DEVICE:
            if all(rank.num_calls >= self.num_calls for rank in ranks):
                self.events.popleft()
        elif self.events[0] == FINISH:
            self.events.popleft()
            self._begin_to_wait()
        else:
            self._call()

    def look(self) -> None:
        """The watcher's."""
        is_free = not self.holds_lock and self.told < 0
        if is_free and self._take_ready() and not self.channel.pending:
            self.channel.send_rest()

    def _call(self) -> None:
        self.holds_lock = self._take_ready() and len(self.channel.pending) >= MOST_PENDING
        if self.told >= 0 or self.holds_lock:
            return
        content = int(self.num_calls == self.odd_call)
        self.channel.post((self.num_calls, content, *[0] * (SIGNATURE_LEN - 2)))
        if self.events.popleft() == NEW_PLAN:
            self._begin_to_wait()

    def _begin_to_wait(self) -> None:
        self.is_waiting = self.holds_lock = True
        self.channel.send_rest()
        self._wait()

    def _wait(self) -> None:
        while self.channel.is_ready():
            if not self._receive():
                return
            self.channel.send_rest()
        self.is_waiting = self.holds_lock = bool(self.channel.pending)

    def _take_ready(self) -> bool:
        while self.channel.is_ready():
            if not self._receive():
                return False
        return True

    def _receive(self) -> bool:
        difference = self.channel.receive(1.0)
        if difference is not None:
            self.told = int(difference[0, 0])
        return difference is None


def run(ranks: list[Rank], turns: list[tuple[int, str]], *, watched: bool) -> None:
    """In the drawn order, and then in turn until all are done."""
    for rank, turn in turns:
        of = ranks[rank % len(ranks)]
        of.look() if turn == "look" else of.step(ranks)
    for _ in range(PATIENCE):
        for rank in ranks:
            rank.step(ranks)
            if watched:
                rank.look()
    assert all(rank.is_done() for rank in ranks)


def check_quiet(ranks: list[Rank]) -> None:
    """Everything was compared, and no rank has started a gather that another one has not."""
    assert {rank.told for rank in ranks} == {-1}
    assert not any(rank.channel.pending or rank.channel.streams.unsent for rank in ranks)
    assert len({rank.channel.group.num_started for rank in ranks}) == 1  # type: ignore[union-attr]
    for rank in ranks:
        assert set(rank.channel.streams.lengths) == {rank.num_calls}


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 3), EVENTS, TURNS)
def test_ranks_that_finish_together_need_no_watcher(
    num_ranks: int, events: list[str], turns: list[tuple[int, str]]
) -> None:
    """However early the watchers of some ranks were; and nothing is left over."""
    gloo = Gloo(num_ranks)
    program = [event for event in events if event != DEVICE]
    ranks = [Rank(gloo, i, [*program, FINISH]) for i in range(num_ranks)]
    run(ranks, turns, watched=False)
    check_quiet(ranks)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, min_size=2, max_size=3), TURNS)
def test_watchers_answer_a_rank_that_waits_alone(
    programs: list[list[str]], turns: list[tuple[int, str]]
) -> None:
    """Ranks make equally many calls, but wait at places of their own."""
    num_calls = max(sum(e in (CALL, NEW_PLAN) for e in events) for events in programs)
    gloo, ranks = Gloo(len(programs)), []
    for i, events in enumerate(programs):
        missing = num_calls - sum(e in (CALL, NEW_PLAN) for e in events)
        ranks.append(Rank(gloo, i, [*events, *[CALL] * missing]))
    run(ranks, turns, watched=True)
    check_quiet(ranks)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, min_size=2, max_size=3), TURNS, st.data())
def test_every_rank_is_told_of_the_first_different_call(
    programs: list[list[str]], turns: list[tuple[int, str]], data: st.DataObject
) -> None:
    num_calls = 1 + max(sum(e in (CALL, NEW_PLAN) for e in events) for events in programs)
    odd_rank = data.draw(st.integers(0, len(programs) - 1))
    odd_call = data.draw(st.integers(0, num_calls - 1))
    gloo, ranks = Gloo(len(programs)), []
    for i, events in enumerate(programs):
        program = [e for e in events if e != DEVICE]  # a device that waits in vain is the watcher's
        missing = num_calls - sum(e in (CALL, NEW_PLAN) for e in program)
        odd = odd_call if i == odd_rank else -1
        ranks.append(Rank(gloo, i, [*program, *[CALL] * missing, FINISH], odd))
    run(ranks, turns, watched=True)
    assert [rank.told for rank in ranks] == [odd_call] * len(ranks)


def test_a_rank_is_told_while_its_device_waits() -> None:
    """Watchers alone find a difference, also behind gathers that one rank has started early."""
    gloo = Gloo(3)
    ranks = [Rank(gloo, i, [CALL] * 40, odd_call=39 if i == 2 else -1) for i in range(3)]
    for rank, num_steps in zip(ranks, (5, 21, 40), strict=True):
        for _ in range(num_steps):
            rank.step(ranks)
        rank.look()
    for _ in range(40):
        for rank in ranks:
            rank.step(ranks)
    looks = 0
    while any(rank.told < 0 for rank in ranks):
        for rank in ranks:
            rank.look()
        looks += 1
    assert looks <= 4 and [rank.told for rank in ranks] == [39] * 3


def test_a_block_holds_a_batch() -> None:
    """What is more waits for the next one."""
    streams, block = Streams(2, 0), np.zeros(BLOCK_SHAPE, np.int64)
    for i in range(BATCH + 3):
        streams.append((i,) * SIGNATURE_LEN)
    sent = []
    for _ in range(3):
        streams.fill(block)
        sent.append(block[1 : 1 + block[0, 0], 0].tolist())
    assert sent == [list(range(BATCH)), list(range(BATCH, BATCH + 3)), []]


def test_a_difference_is_a_copy() -> None:
    """The buffers of its gather are used again."""
    streams, blocks = Streams(2, 0), np.zeros((2, *BLOCK_SHAPE), np.int64)
    blocks[:, 0, 0], blocks[1, 2] = 2, 7
    difference = streams.take_in(blocks)
    blocks[:] = -1
    assert difference is not None and difference.tolist() == [[0] * 8, [7] * 8]
