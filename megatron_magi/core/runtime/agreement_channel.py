"""The CPU group over which ranks compare their calls, and how it ends.

A gloo group of our own, because the job's group may be NCCL's, which would order small messages
behind large ones on the device. Its threads outlive a call: what they hold (buffers, unfinished
work) stays referenced from here until the group has ended, so that none of them ever drops the last
reference of a Python tensor, which needs the interpreter and aborts the process when that is gone.
"""

from __future__ import annotations

import atexit
import ctypes
import time
from collections import Counter, deque
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from megatron_magi.core.runtime.agreement_record import RECORD_LEN, Records

_num_opened: Counter[str] = Counter()
"""Channels that this process opened, by the name of their parent group."""
_unfinished: list[Channel] = []
"""Closed channels that still wait for a rank that may never come."""

EXIT_PATIENCE_S = 1.0
"""How long the end of the process waits for comparisons that are under way."""


@dataclass
class _Slot:
    """Buffers of one comparison, used again when it is done."""

    mine: Tensor
    gathered: Tensor
    work: dist.Work | None = None

    def records(self) -> Records:
        records: Records = self.gathered.view(-1, RECORD_LEN).numpy()
        return records


class Channel:
    """Records of all ranks of one group, gathered in the order in which they were sent."""

    def __init__(self, parent: dist.ProcessGroup, timeout_s: float) -> None:
        """All ranks of ``parent`` open one at about the same time.

        ``dist.new_group`` needs every rank of the job, and its local variant names a group by how
        many groups the process is in, which differs between pipeline stages. So the group is made
        on the job's store, under the name of its parent.

        Raises:
            RuntimeError: a rank did not come within ``timeout_s``.
        """
        ranks = dist.get_process_group_ranks(parent)
        name = f"{parent.group_name}/{'-'.join(map(str, ranks))}"
        _num_opened[name] += 1
        store = PrefixStore(
            f"megatron_magi/agreement/{name}/{_num_opened[name]}", _get_default_store()
        )
        self.size, self.timeout_s = len(ranks), timeout_s
        self.group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(
            store, dist.get_rank(parent), self.size, timedelta(seconds=timeout_s)
        )
        self.pending: deque[_Slot] = deque()
        self.free: list[_Slot] = []
        self.num_sent = 0

    def send(self, record: tuple[int, ...]) -> None:
        """Start gathering the next record; returns at once."""
        assert self.group is not None, "a closed channel sends nothing"
        slot = self.free.pop() if self.free else _new_slot(self.size)
        slot.mine.numpy()[:] = record
        slot.work = self.group._allgather_base(slot.gathered, slot.mine)  # type: ignore[attr-defined]
        self.pending.append(slot)
        self.num_sent += 1

    def is_ready(self) -> bool:
        """The oldest comparison under way has ended, well or not."""
        work = self.pending[0].work if self.pending else None
        return work is not None and work.is_completed()

    def is_quiet(self) -> bool:
        """Nothing is under way."""
        return all(slot.work is None or slot.work.is_completed() for slot in self.pending)

    def receive(self, timeout_s: float) -> Records:
        """All ranks' oldest records, [ranks, RECORD_LEN]; a copy.

        Raises:
            RuntimeError: a rank did not come within ``timeout_s``, or is gone.
        """
        slot = self.pending[0]
        assert slot.work is not None
        slot.work.wait(timedelta(seconds=timeout_s))
        records = slot.records().copy()
        slot.work = None
        self.free.append(self.pending.popleft())
        return records

    def close(self) -> None:
        """End the group now, or as soon as what is under way has ended."""
        if self.is_quiet():
            self.group = None  # joins its threads, and only then the buffers may go
            self.pending.clear()
        elif self not in _unfinished:
            _unfinished.append(self)


def close_unfinished(patience_s: float = 0) -> None:
    """End the closed channels whose comparisons have ended meanwhile."""
    deadline = time.monotonic() + patience_s
    waiting = list(_unfinished)
    _unfinished.clear()
    for channel in waiting:
        while not channel.is_quiet() and time.monotonic() < deadline:
            time.sleep(0.005)
        channel.close()


def _leave_unfinished() -> None:
    """At the end of the process: end what can be ended; what cannot is never taken apart."""
    close_unfinished(EXIT_PATIENCE_S)
    for channel in _unfinished:
        leave_running(channel)


def leave_running(channel: Channel) -> None:
    """At the end of the process, where its threads go on: they must not meet destroyed objects.

    The static objects of PyTorch's libraries are destroyed by handlers of the C library. Handlers
    run from the last to the first, and here ``_exit`` comes before those, with the exit status as
    its argument; the open files of C are written before it.
    """
    leave(channel)
    libc = ctypes.CDLL(None)
    for handler in (libc._exit, libc.fcloseall):
        libc.on_exit(handler, None)


def leave(channel: Channel) -> None:
    """Never take it apart: its threads are busy, or are those of another process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))


def _new_slot(size: int) -> _Slot:
    mine, gathered = (torch.zeros(n * RECORD_LEN, dtype=torch.int64) for n in (1, size))
    return _Slot(mine, gathered)


atexit.register(_leave_unfinished)
