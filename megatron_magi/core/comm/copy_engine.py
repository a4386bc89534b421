"""A transport for the GPUs of one host that takes no SM: copy engines read the peers' rows.

A rank fills a slot of its symmetric memory, tells its peers, and reads from theirs what is for it,
on a stream of its own that waits for flags (csrc/attention/rows/pull.cpp). Rows that kernels write
are written to the slot directly.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.core.comm.rows import side_by_side_gather
from megatron_magi.core.comm.symmetric_memory import NUM_SLOTS, SymmetricMemory, view_of
from megatron_magi.core.comm.transport import PendingSend, RowCounts, gathered
from megatron_magi.core.cuda.abi import Pull, SendParams
from megatron_magi.core.cuda.library import cuda_library, on_device, stream_handle

READ_S = 5.0
"""Seconds that a report waits for the flags: a stuck device may have other work before the copy."""
GROWTH = 1.25
"""Slots that are too small are replaced by slots of this factor times the bytes needed."""


@dataclass(eq=False)
class RowCopies:
    """An exchange under way; ``wait`` may be called once."""

    engine: CopyEngine
    number: int
    filled: torch.cuda.Event
    """This rank's rows lie ready."""
    arrived: torch.cuda.Event
    recv: Tensor | None
    """Kept until a stream waits for the copies or they end. Later work of a stream that has waited
    runs after the copies. The host may be microbatches ahead of their end."""
    is_awaited: bool = False

    def wait(self) -> None:
        """Let the current stream wait for the rows."""
        engine, self.is_awaited = self.engine, True
        engine.library.wait_event(stream_handle(engine.device), self.arrived.cuda_event)
        self.recv = None


class CopyEngine:
    """See ``Transport``; for one device of one process."""

    uses_sms = False
    can_delay_send = False  # the next exchange sends the rows in the slot
    name = "symm_mem"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slot_bytes: int) -> None:
        """All ranks of the group create it together.

        Raises:
            RuntimeError: the ranks' GPUs cannot address each other's memory, or have too little.
        """
        self.device = device
        self.library = cuda_library()
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._under_way: deque[RowCopies] = deque()
        """Exchanges of which it is not known that they have ended, in their order."""
        self._late: tuple[RowCopies, float] | None = None
        """The exchange that the watcher saw waiting for peers, and since when."""
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._open(group, slot_bytes)

    def _open(self, group: dist.ProcessGroup, slot_bytes: int) -> None:
        self.memory = SymmetricMemory(group, self.device, slot_bytes)
        self.number = 0
        """The number of the last exchange that was begun."""
        self._claimed = -1
        memory, peers = self.memory, len(self.memory.peers)
        self._pulls = (Pull * peers)()
        flags = ctypes.addressof(memory.flags)
        self._send = SendParams()
        self._claim, self._params = self._send.claim, self._send.exchange
        self._gather = ctypes.addressof(self._send) + SendParams.gather.offset
        self._claim.flags = self._params.flags = flags
        self._claim.num_peers = self._params.num_peers = peers
        self._params.pulls = ctypes.addressof(self._pulls)
        self._params.beside = self.stream.cuda_stream

    def reserve(self, group: dist.ProcessGroup, slot_bytes: int) -> None:
        """Make slots hold ``slot_bytes``. All ranks pass the same number, before an exchange.

        Raises:
            RuntimeError: too little memory.

        Cost: nothing if they are large enough; otherwise the host waits for the device and for
        the other ranks.
        """
        if slot_bytes <= self.memory.slot_bytes:
            return
        torch.cuda.synchronize(self.device)  # peers have read what this rank holds for them
        dist.barrier(group)
        torch.cuda.synchronize(self.device)
        del self.memory
        torch.cuda.empty_cache()  # symmetric memory does not come from PyTorch's cache
        self._open(group, int(GROWTH * slot_bytes))

    def room(
        self, like: Tensor, num_rows: int, shapes: Sequence[torch.Size], dtype: torch.dtype
    ) -> Tensor:
        """See Transport. The current stream waits until peers have read the slot's last rows."""
        columns = 0
        for shape in shapes:
            columns += shape.numel()
        return view_of(self._claim_slot()[dtype], num_rows, columns)

    def _claim_slot(self) -> dict[torch.dtype, Tensor]:
        if self._prepare_claim():
            with on_device(self.device):
                self.library.call("magi_claim_slot", self._claim)
        return self.memory.slots[self._claimed % NUM_SLOTS]

    def _prepare_claim(self) -> bool:
        """Describe the claim of the next exchange's slot; False if there is nothing to wait for."""
        number = self.number + 1
        held = max(number - NUM_SLOTS, 0) if self._claimed != number else 0
        self._claimed = number
        self._claim.stream, self._claim.number = stream_handle(self.device), held
        return held > 0

    def send_rows(
        self, xs: Sequence[Tensor], index: Tensor, recv: Tensor, counts: RowCounts
    ) -> PendingSend:
        """See Transport; one call of the library, if its kernel takes the rows."""
        launch = side_by_side_gather(xs, index.shape[0])
        if launch is None:
            rows = gathered(self, xs, index, index.shape[0])
            return PendingSend(None, self.exchange(rows, recv, counts))
        self._prepare_claim()
        slot = self.memory.addresses[self._claimed % NUM_SLOTS]
        gather = launch.params(xs, index, slot)
        ctypes.memmove(self._gather, gather, len(gather))
        return PendingSend(None, self._begin("magi_send_rows", self._send, recv, counts, 0))

    def exchange(
        self, send: Tensor, recv: Tensor, counts: RowCounts, first_row: int = 0
    ) -> RowCopies:
        """See Transport."""
        self._claim_slot()  # a rank that has nothing to send has not claimed it yet
        return self._begin("magi_exchange", self._params, recv, counts, first_row)

    def _begin(
        self, name: str, call: ctypes.Structure, recv: Tensor, counts: RowCounts, first_row: int
    ) -> RowCopies:
        self.number = number = self.number + 1
        self._locate(recv, counts, first_row)
        self._collect()
        filled, arrived = self._events.pop() if self._events else self._new_events()
        params = self._params
        params.current = stream_handle(self.device)
        params.filled, params.arrived = filled.cuda_event, arrived.cuda_event
        params.number = number
        with on_device(self.device):
            self.library.call(name, call)
        copies = RowCopies(self, number, filled, arrived, recv)
        self._under_way.append(copies)
        return copies

    def _collect(self) -> None:
        """Release the tensors and events of exchanges that have ended."""
        while self._under_way and self._under_way[0].arrived.query():
            ended = self._under_way.popleft()
            ended.recv = None
            if ended.is_awaited:
                self._events.append((ended.filled, ended.arrived))

    def _locate(self, recv: Tensor, counts: RowCounts, first_row: int) -> None:
        """Fill in what is read from which peer."""
        assert counts.starts is not None, "the plan was made for another transport"
        row_bytes = recv.shape[1] * recv.element_size()
        target, place = recv.data_ptr(), 0
        places = []
        for rows in counts.recv:
            places.append(place)
            place += rows * row_bytes
        slots = self.memory.peer_slots[self.number % NUM_SLOTS]
        for pull, peer, slot in zip(self._pulls, self.memory.peers, slots, strict=True):
            pull.source = slot + (first_row + counts.starts[peer]) * row_bytes
            pull.target = target + places[peer]
            pull.bytes = counts.recv[peer] * row_bytes

    def _new_events(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        pair = torch.cuda.Event(), torch.cuda.Event()
        for event in pair:
            event.record(self.stream)  # which creates it
        return pair

    def overdue(self, seconds: float) -> str | None:
        """The report of a device that has waited for its peers for longer than ``seconds``; else
        None. A watcher calls this about once a second. A device that has other work before the
        exchange is not late."""
        waiting = self._waiting_for_peers()
        if waiting is None or self._late is None or self._late[0] is not waiting:
            self._late = None if waiting is None else (waiting, time.monotonic())
            return None
        if time.monotonic() - self._late[1] < seconds:
            return None
        absent = self._absent(waiting.number)
        return (
            f"every rank must begin the same exchanges, and {absent} not begun exchange "
            f"{waiting.number} within {seconds:.0f} s; look for the first error in their logs"
        )

    def _waiting_for_peers(self) -> RowCopies | None:
        """The oldest exchange that has not ended, if this rank's rows lie ready."""
        done = self.library.is_done
        try:
            first = next((x for x in self._under_way if not done(x.arrived.cuda_event)), None)
        except RuntimeError:  # another thread begins an exchange at this moment
            return None
        return first if first is not None and done(first.filled.cuda_event) else None

    def _absent(self, number: int) -> str:
        """Names the ranks that have not begun an exchange, as far as the device still answers."""
        found: list[int] = []
        memory = self.memory

        def look() -> None:
            numbers = memory.numbers().items()
            found.extend(peer for peer, (ready, _) in numbers if ready < number)

        reader = threading.Thread(target=look, daemon=True)
        reader.start()
        reader.join(READ_S)
        return f"rank(s) {found} of the group have" if found else "some rank of the group has"
