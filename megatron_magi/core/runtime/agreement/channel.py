"""The CPU group over which ranks gather each other's signatures, and how it ends.

It is magi's own gloo group, because the job's group may use NCCL, which would queue these small
messages behind large ones on the device. The group's threads outlive a call. This module keeps
references to what they hold (buffers, unfinished work) until the group has ended. A thread that
dropped the last reference to a Python tensor would need the interpreter, and would abort the
process if the interpreter has already ended.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.core.comm.process_group import rendezvous_store
from megatron_magi.core.runtime.agreement.signature import Signature, Signatures
from megatron_magi.core.runtime.agreement.stream import BLOCK_SHAPE, Streams

_unfinished: deque[Channel] = deque()
"""Closed channels with gathers under way, or whose signatures other ranks may still need."""
_ending = threading.Lock()
"""Held by the thread that looks after ``_unfinished``."""

EXIT_PATIENCE_S = 2.5
"""How long the end of the process waits for gathers that are under way. It covers two periods of a
watcher, so that a rank that continues gets the last signatures of one that ends."""
ANSWER_S = 3.0
"""Added to the group's timeout: a rank that calls in time may send later, through its watcher."""


@dataclass
class _Slot:
    """Buffers of one gather, which are reused when it is done."""

    mine: Tensor
    gathered: Tensor
    block: Signatures
    """``mine`` as a numpy array of BLOCK_SHAPE."""
    blocks: Signatures
    """``gathered`` as a numpy array, [ranks, *BLOCK_SHAPE]."""
    work: dist.Work | None = None


class Channel:
    """The streams of signatures of one group's ranks, and the gathers that carry them."""

    def __init__(self, parent: dist.ProcessGroup, timeout_s: float) -> None:
        """All ranks of ``parent`` open one at about the same time.

        Raises:
            RuntimeError: a rank did not come within ``timeout_s``.
        """
        rank, size = dist.get_rank(parent), dist.get_world_size(parent)
        self.timeout_s = timeout_s
        store = rendezvous_store(parent, "agreement")
        timeout = timedelta(seconds=timeout_s + ANSWER_S)
        self.group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.streams = Streams(size, rank)
        self.pending: deque[_Slot] = deque()
        self.free: list[_Slot] = []
        self.answers = False
        """The channel is closed, but other ranks may not have all its signatures yet."""

    def post(self, signature: Signature) -> None:
        """Append the next call; a full batch is sent."""
        self.streams.append(signature)
        if self.streams.has_batch():
            self.send()

    def send(self) -> None:
        """Start the next gather with signatures that were not sent yet, and return at once."""
        assert self.group is not None, "a closed channel sends nothing"
        slot = self.free.pop() if self.free else _new_slot(len(self.streams.lengths))
        self.streams.fill(slot.block)
        slot.work = self.group._allgather_base(slot.gathered, slot.mine)  # type: ignore[attr-defined]
        self.pending.append(slot)

    def send_rest(self) -> None:
        """Send what was not sent yet, or an empty block if another rank is behind and nothing is
        under way: the two rules of ``stream.py``."""
        if self.streams.unsent or (not self.pending and self.streams.leads()):
            self.send()

    def is_ready(self) -> bool:
        """True if the oldest gather under way has ended, with or without an error."""
        work = self.pending[0].work if self.pending else None
        return work is not None and work.is_completed()

    def is_quiet(self) -> bool:
        """True if no gather is under way."""
        return all(slot.work is None or slot.work.is_completed() for slot in self.pending)

    def receive(self, timeout_s: float) -> Signatures | None:
        """Take in the oldest gather.

        Returns:
            All ranks' signatures of the first call in which they differ, [ranks, SIGNATURE_LEN].

        Raises:
            RuntimeError: a rank did not come within ``timeout_s``, or is gone.
        """
        slot = self.pending[0]
        assert slot.work is not None
        slot.work.wait(timedelta(seconds=timeout_s))
        difference = self.streams.take_in(slot.blocks)
        slot.work = None
        self.free.append(self.pending.popleft())
        return difference

    def close(self) -> None:
        """End the group now, or as soon as what is under way has ended."""
        if self._has_ended():
            self.group = None  # joins its threads; only then may the buffers be freed
            self.pending.clear()
        else:
            _unfinished.append(self)

    def retire(self) -> None:
        """Close without an error, but first send the other ranks what this one has called: a rank
        that continues would otherwise report this one as lost."""
        self.answers = True
        self.close()

    def _has_ended(self) -> bool:
        if self.answers:
            self._answer()
        return self.is_quiet() and not (self.answers and self.pending)

    def _answer(self) -> None:
        """The next step of a retired channel. It ignores errors: no call is left to raise them."""
        try:
            while self.is_ready():
                self.answers &= self.receive(self.timeout_s) is None
            if self.answers and not self.pending:
                self.send_rest()
        except RuntimeError:
            self.answers = False


def close_unfinished(patience_s: float = 0) -> None:
    """End the closed channels whose gathers are done, waiting for up to ``patience_s``."""
    deadline = time.monotonic() + patience_s
    with _ending:
        while True:
            for _ in range(len(_unfinished)):
                _unfinished.popleft().close()  # appends itself again while it cannot end
            if not _unfinished or time.monotonic() >= deadline:
                return
            time.sleep(0.005)


def _leave_unfinished() -> None:
    """At the end of the process: end the channels that can end, and never destroy the others."""
    close_unfinished(EXIT_PATIENCE_S)
    for channel in _unfinished:
        leave_running(channel)


def leave_running(channel: Channel) -> None:
    """Let a channel's threads run on while the process ends, without meeting destroyed objects.

    The static objects of PyTorch's libraries are destroyed by handlers of the C library. Handlers
    run from the last to the first, so ``_exit`` runs before those, with the exit status as its
    argument, and C's open files are flushed before that.
    """
    leave(channel)
    libc = ctypes.CDLL(None)
    for handler in (libc._exit, libc.fcloseall):
        libc.on_exit(handler, None)


def forget_in_child() -> None:
    """Start afresh after a fork: the closed channels' threads, and one that may have held the lock,
    do not exist in the child."""
    global _ending
    _ending = threading.Lock()
    while _unfinished:
        leave(_unfinished.popleft())


def leave(channel: Channel) -> None:
    """Never destroy the channel: its threads are busy, or belong to another process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))


def _new_slot(size: int) -> _Slot:
    with torch.inference_mode(False):  # training may follow an evaluation that opened it
        mine, gathered = (
            torch.zeros(n, *BLOCK_SHAPE, dtype=torch.int64, device="cpu") for n in (1, size)
        )
    return _Slot(mine.flatten(), gathered.flatten(), mine[0].numpy(), gathered.numpy())


atexit.register(_leave_unfinished)
