"""The copy engines of all ranks in one process, for tests.

A stand-in for the library queues what a call asks for, as read from its structs; a scheduler then
runs the heads of the queues in random order. Memory is the host's.
"""

from __future__ import annotations

import ctypes
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_magi.core.comm import copy_engine, symmetric_memory
from megatron_magi.core.comm import rows as rows_module
from megatron_magi.core.comm.copy_engine import CopyEngine
from megatron_magi.core.comm.symmetric_memory import FLAGS_BYTES, NUM_SLOTS, SymmetricMemory
from megatron_magi.core.cuda.abi import (
    ClaimParams,
    ExchangeParams,
    GatherParams,
    PeerFlags,
    Pull,
    SendParams,
)
from tests.core.kernel import abi_on_cpu

COLUMNS, SLOT_ROWS = 8, 64
CPU = torch.device("cpu")
Step = tuple[Callable[[], bool], Callable[[], None]]
"""Whether an operation may run, and what it does."""


class Streams:
    """The operations of all ranks' streams."""

    def __init__(self) -> None:
        self.queues: dict[int, deque[Step]] = defaultdict(deque)
        self.recorded: dict[int, int] = defaultdict(int)
        """How often each event was recorded by operations that have run."""
        self.kept: list[Any] = []
        """What operations in a queue read by address."""
        self.promised: dict[int, int] = defaultdict(int)
        """How often it was recorded by operations in a queue."""

    def add(
        self, stream: int, run: Callable[[], None], may: Callable[[], bool] = lambda: True
    ) -> None:
        self.queues[stream].append((may, run))

    def record(self, stream: int, event: int) -> None:
        self.promised[event] += 1
        self.add(stream, lambda: self.recorded.__setitem__(event, self.recorded[event] + 1))

    def wait(self, stream: int, event: int) -> None:
        number = self.promised[event]
        self.add(stream, lambda: None, lambda: self.recorded[event] >= number)

    def is_done(self, event: int) -> bool:
        return self.recorded[event] == self.promised[event]

    def run(self, order: random.Random) -> None:
        """Everything, in a random order of the streams."""
        while waiting := [queue for queue in self.queues.values() if queue]:
            ready = [queue for queue in waiting if queue[0][0]()]
            assert ready, "every stream waits for another one"
            order.choice(ready).popleft()[1]()


def flag(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


def launch_of(xs: Sequence[Tensor], num_rows: int) -> rows_module.SideBySideGather | None:
    """As if a library were loaded."""
    lies = [(x.shape, x.stride(), x.dtype) for x in xs]
    return rows_module._gathering_side_by_side(num_rows, *lies)


class Library:
    """In place of the CUDA library."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def call(self, name: str, p: Any) -> None:
        {
            "magi_claim_slot": self.claim, "magi_exchange": self.exchange,
            "magi_send_rows": self.send,
        }[name](p)  # fmt: skip

    def wait_event(self, stream: int, event: int) -> None:
        self.streams.wait(stream, event)

    def is_done(self, event: int) -> bool:
        return self.streams.is_done(event)

    def send(self, p: SendParams) -> None:
        if p.claim.number:
            self.claim(p.claim)
        gather = GatherParams.from_buffer_copy(p.gather)
        self.streams.add(gather.stream, lambda: abi_on_cpu.gather(gather))
        self.exchange(p.exchange)

    def claim(self, p: ClaimParams) -> None:
        for peer in self.flags(p):
            self.until(p.stream, peer.taken_here, p.number)

    def exchange(self, p: ExchangeParams) -> None:
        self.streams.record(p.current, p.filled)
        self.streams.wait(p.beside, p.filled)
        peers = self.flags(p)
        for peer in peers:
            self.write(p.beside, peer.ready_there, p.number)
        pulls = (Pull * p.num_peers).from_address(p.pulls)
        for peer, pull in zip(peers, pulls, strict=True):
            if pull.bytes:
                self.until(p.beside, peer.ready_here, p.number)
                self.streams.add(p.beside, copying(pull.target, pull.source, pull.bytes))
        for peer in peers:
            self.write(p.beside, peer.taken_there, p.number)
        self.streams.record(p.beside, p.arrived)

    def flags(self, p: Any) -> list[PeerFlags]:
        return list((PeerFlags * p.num_peers).from_address(p.flags))

    def until(self, stream: int, address: int, number: int) -> None:
        self.streams.add(stream, lambda: None, lambda: flag(address).value >= number)

    def write(self, stream: int, address: int, number: int) -> None:
        self.streams.add(stream, lambda: setattr(flag(address), "value", number))


def copying(target: int, source: int, size: int) -> Callable[[], None]:
    return lambda: ctypes.memmove(target, source, size) and None


class Ranks:
    """The engines of all ranks."""

    def __init__(self, count: int, patch: pytest.MonkeyPatch, slot_rows: int = SLOT_ROWS) -> None:
        self.count, self.streams = count, Streams()
        size = FLAGS_BYTES + NUM_SLOTS * symmetric_memory.ALIGNMENT
        self.buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]
        self.handles = iter(range(1, 10**6))
        patch.setattr(copy_engine, "cuda_library", lambda: Library(self.streams))
        patch.setattr(copy_engine, "SymmetricMemory", self.memory)
        patch.setattr(copy_engine, "stream_handle", lambda device: self.current)
        patch.setattr(copy_engine, "side_by_side_gather", launch_of)
        patch.setattr(rows_module, "stream_handle", lambda device: self.current)
        patch.setattr(copy_engine, "on_device", lambda device: torch.no_grad())
        patch.setattr(torch.cuda, "Stream", self.stream)
        patch.setattr(torch.cuda, "Event", self.event)
        patch.setattr(symmetric_memory, "rendezvous", self.rendezvous)
        self.engines, self.rank = [], 0
        for self.rank in range(count):
            group: Any = SimpleNamespace(rank=self.rank)
            self.engines.append(CopyEngine(group, CPU, slot_rows * COLUMNS * 4))

    def memory(self, group: Any, device: torch.device, slot_bytes: int) -> SymmetricMemory:
        return SymmetricMemory(group, device, slot_bytes)

    def rendezvous(self, group: Any, device: torch.device, size: int) -> Any:
        assert size == len(self.buffers[group.rank])
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        return symmetric_memory.Shared(self.buffers[group.rank], None, addresses, group.rank)

    def stream(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(cuda_stream=1000 + self.rank)

    def event(self) -> Any:
        handle = next(self.handles)
        return SimpleNamespace(
            cuda_event=handle,
            record=lambda stream: None,
            query=lambda: self.streams.is_done(handle),
        )

    @property
    def current(self) -> int:
        """The stream that the ranks compute on."""
        return 1 + self.rank
