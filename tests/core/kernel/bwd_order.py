"""A simulation of the backward's deterministic mode: who adds when, over a random legal course."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from megatron_magi.core.native import solver
from tests.core.kernel.bwd_steps import TILE_Q, steps_of

TWO, ENDS_FIRST, ENDS_SECOND, CONTINUES, ALL_FLAGS = 1, 2, 4, 8, 16
"""Flags of a visit's signal, as in csrc/attention/backward/visit.h."""

WRITE, SIGNAL = -1, -2
"""What the warp does, where a thread that adds has the number of its half."""


class Barrier:
    """An mbarrier: a wait passes when the phase of its parity is over."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.phase = count, 0, 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.phase = 0, self.phase + 1

    def passes(self, parity: int) -> bool:
        return self.phase % 2 != parity


@dataclass(frozen=True)
class Adders:
    """The threads that add an item's steps in turns, each in its own order.

    Either they leave signals and used visits to the warp that writes visits (dq_in_order.cuh), or
    they signal what they have added and say which visits they have read (dq_order_inline.cuh).
    """

    threads: int
    hand_over: bool


ADDERS = {64: Adders(2, False), 128: Adders(1, True), 256: Adders(1, False)}
"""By head_dim. Two threads that add half of the columns each are like one."""


class Block:
    """One running item: a warp writes visits ahead of the threads that add its steps, AT_ONCE at a
    time, to a ring of twice as many (dq_order.cuh)."""

    AT_ONCE = 4

    def __init__(self, walk: list[tuple[int, int]], visits: np.ndarray, adders: Adders) -> None:
        self.walk, self.visits = walk, visits.tolist()
        self.next = list(range(adders.threads))
        self.added: set[int] = set()
        self.hands_over = adders.hand_over
        self.signalled = 0
        self.batch = 0
        self.ring: list[tuple[int, list[int]]] = [(-1, [])] * 2 * self.AT_ONCE
        self.full = [Barrier(1), Barrier(1)]
        self.empty = [Barrier(adders.threads), Barrier(adders.threads)]

    def is_done(self) -> bool:
        return len(self.added) == len(self.walk) and not self.may_signal()

    def may_write(self) -> bool:
        if self.batch * self.AT_ONCE >= len(self.walk):
            return False
        if self.hands_over:
            return self.signalled >= (self.batch - 1) * self.AT_ONCE
        return self.empty[self.batch % 2].passes((self.batch // 2 + 1) & 1)

    def write(self) -> None:
        first = self.batch * self.AT_ONCE
        for n in range(first, min(first + self.AT_ONCE, len(self.walk))):
            self.ring[n % len(self.ring)] = (n, self.visits[n])
        self.full[self.batch % 2].arrive()
        self.batch += 1

    def may_add(self, half: int, finished: list[int]) -> bool:
        """Whether the next step of a half has its turn, as in dq_in_order.cuh."""
        n = self.next[half]
        if n >= len(self.walk):
            return False
        batch = n // self.AT_ONCE
        first_of_batch = n % self.AT_ONCE < len(self.next)
        if first_of_batch and not self.full[batch % 2].passes(batch // 2 & 1):
            return False
        written, (group, first, second, signal) = self.ring[n % len(self.ring)]
        assert written == n, "the ring has another step"
        if first and finished[group] != first:
            return False
        if second and finished[group + 1] != second:
            return False
        return not (signal & CONTINUES) or all(m in self.added for m in range(n))

    def may_signal(self) -> bool:
        """Whether the warp finds a step that was added and that it has not signalled."""
        return self.hands_over and self.signalled < len(self.added)

    def signal_next(self, finished: list[int]) -> None:
        self.signal(self.signalled, finished)
        self.signalled += 1

    def signal(self, n: int, finished: list[int]) -> None:
        written, (group, _, _, signal) = self.ring[n % len(self.ring)]
        assert written == n, "the ring has another step"
        if signal & ENDS_FIRST:
            finished[group] = signal // ALL_FLAGS
        if signal & ENDS_SECOND:
            finished[group + 1] = signal // ALL_FLAGS

    def add(self, half: int, finished: list[int]) -> tuple[int, int]:
        n = self.next[half]
        if not self.hands_over:
            self.signal(n, finished)
        if n % self.AT_ONCE >= self.AT_ONCE - len(self.next):
            self.empty[n // self.AT_ONCE % 2].arrive()
        self.next[half] += len(self.next)
        self.added.add(n)
        return self.walk[n]


def run_in_any_order(
    work: solver.BwdWorkList,
    visits: np.ndarray,
    num_q: int,
    rng: random.Random,
    width: int,
    head_dim: int,
) -> list[list[int]]:
    """Entries that add to each query row, in the order of a random legal execution.

    ``width`` items run at a time, started in list order, each with the ``ADDERS`` of ``head_dim``.
    """
    adders = ADDERS[head_dim]
    finished = [0] * work.num_row_groups
    order: list[list[int]] = [[] for _ in range(num_q)]
    ends = np.cumsum(work.items[:, 4])
    waiting = [
        Block(steps_of(work, item), part, adders)
        for item, part in zip(work.items.tolist(), np.split(visits, ends[:-1]), strict=True)
    ]
    running: list[Block] = []
    while waiting or running:
        while waiting and len(running) < width:
            running.append(waiting.pop(0))
        running = [block for block in running if not block.is_done()]
        ready = [(b, h) for b in running for h in range(adders.threads) if b.may_add(h, finished)]
        ready += [(b, WRITE) for b in running if b.may_write()]
        ready += [(b, SIGNAL) for b in running if b.may_signal()]
        assert ready or not running, "every running item waits: a deadlock"
        if ready:
            block, half = rng.choice(ready)
            if half == WRITE:
                block.write()
                continue
            if half == SIGNAL:
                block.signal_next(finished)
                continue
            e, q = block.add(half, finished)
            for row in range(q, min(q + TILE_Q, work.entries[e][1])):
                order[row].append(e)
    return order


def in_list_order(work: solver.BwdWorkList, num_q: int) -> list[list[int]]:
    """Entries that add to each query row, in the order of the list."""
    order: list[list[int]] = [[] for _ in range(num_q)]
    for item in work.items.tolist():
        for e, q in steps_of(work, item):
            for row in range(q, min(q + TILE_Q, work.entries[e][1])):
                order[row].append(e)
    return order
