"""A communicator of its own for reduces, over the ranks of a context-parallel group.

A communicator runs exchanges one after the other. In the group's own, a cast that is begun after a
reduce would begin to move rows only after the reduce has moved all of its rows.
docs/design/planner.md says when that matters, and why two communicators cannot deadlock here.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions

from megatron_magi.core.comm.process_group import is_alive, rendezvous_store

_opened: WeakKeyDictionary[dist.ProcessGroup, dict[str, ReduceGroup | None]] = WeakKeyDictionary()
"""The communicator of each group and type of device. None: reduces use the group's own."""
_table_lock = threading.Lock()


class ReduceGroup:
    """A communicator, and its end: ``destroy_process_group`` does not know it."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __del__(self) -> None:
        self.close()

    def all_to_all(
        self, recv: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int]
    ) -> dist.Work:
        """An asynchronous ``dist.all_to_all_single`` by this communicator."""
        options = AllToAllOptions()
        if hasattr(options, "asyncOp"):  # older versions take every exchange for asynchronous
            options.asyncOp = True
        work: dist.Work = self.backend.alltoall_base(recv, send, recv_counts, send_counts, options)
        return work

    def close(self) -> None:
        """End the communicator, after its parent has ended."""
        backend, self.backend = self.backend, None
        if hasattr(backend, "shutdown"):
            backend.shutdown()

    def leave(self, *, in_child: bool = False) -> None:
        """Let go of the communicator without waiting for its peers, which may be gone: NCCL aborts,
        and gloo's threads run on. A child after a fork has the threads of neither."""
        backend, self.backend = self.backend, None
        if in_child or isinstance(backend, dist.ProcessGroupGloo):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def reduce_group(
    parent: dist.ProcessGroup, device: torch.device, timeout_s: float
) -> ReduceGroup | None:
    """The communicator for reduces of tensors on a device; None: the group's own.

    All ranks of ``parent`` call it the first time at about the same place; other ranks of the job
    need not. Exchanges have the timeout of the parent's, and so has NCCL's watchdog.

    Args:
        timeout_s: how long the first call waits for the other ranks.

    Raises:
        RuntimeError: a rank did not come.

    Cost: the first call of a group connects its ranks over gloo; over NCCL, the first exchange
    does, and takes GPU memory as any communicator.
    """
    with _table_lock:
        found = _opened.setdefault(parent, {})
    if device.type not in found:
        _close_dead()
        found[device.type] = _open(parent, device, timeout_s)
    return found[device.type]


def share_communicator(parent: dist.ProcessGroup) -> None:
    """Let reduces of a group use its own communicator, because Megatron aborts communicators itself
    (in-process restart). Every rank calls it before the first backward."""
    _opened[parent] = {"cpu": None, "cuda": None}


def forget_communicators() -> None:
    """Close those of groups that have ended, and forget all groups."""
    _close_dead()
    with _table_lock:
        _opened.clear()


def _open(parent: dist.ProcessGroup, device: torch.device, timeout_s: float) -> ReduceGroup | None:
    like = parent._get_backend(device)
    store = rendezvous_store(parent, f"reduces/{device.type}")
    rank, size = dist.get_rank(parent), dist.get_world_size(parent)
    if type(like) is getattr(dist, "ProcessGroupNCCL", None):
        return ReduceGroup(dist.ProcessGroupNCCL(store, rank, size, _nccl_options(like.options)))
    if type(like) is not dist.ProcessGroupGloo:
        return None
    try:
        made = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RuntimeError(_who_did_not_come(parent, timeout_s, error)) from None
    made._set_default_timeout(like.options._timeout)
    return ReduceGroup(made)


def _who_did_not_come(parent: dist.ProcessGroup, timeout_s: float, error: RuntimeError) -> str:
    return (
        f"all ranks {dist.get_process_group_ranks(parent)} must begin their backward within "
        f"{timeout_s:.0f} s of each other, and one did not come (seen by rank "
        f"{dist.get_rank()}); look for the first error in the other ranks' logs, or raise "
        f"MagiConfig.agreement_timeout_s ({error})"
    )


def _nccl_options(like: Any) -> Any:
    """The options of the parent, without those that say how its communicator was made."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=like.is_high_priority_stream)
    for name in ("_timeout", "config", "global_ranks_in_group"):
        if hasattr(like, name):
            setattr(options, name, getattr(like, name))
    return options


def _listed(*, alive: bool) -> list[ReduceGroup]:
    """The communicators of parents that have not ended, or of those that have."""
    with _table_lock:
        found = [made for parent, made in _opened.items() if is_alive(parent) == alive]
    return [group for made in found for group in made.values() if group is not None]


def _close_dead() -> None:
    for group in _listed(alive=False):
        group.close()


def _leave_all() -> None:
    """Before the interpreter ends."""
    _close_dead()
    for group in _listed(alive=True):
        group.leave()


def _forget_in_child() -> None:
    global _opened, _table_lock
    _table_lock = threading.Lock()  # a thread that held it does not exist here
    for made in list(_opened.values()):
        for group in made.values():
            if group is not None:
                group.leave(in_child=True)
    _opened = WeakKeyDictionary()


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_forget_in_child)
