"""A few gloo processes that run test functions, kept alive between tests.

Importing torch and Megatron costs seconds per process: they are forked from one that has imported
them, and one pool serves many tests. A call that does not finish in time ends the pool and fails
the test: never a hang.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.lib import shared_gpu

_pools: dict[tuple[int, str], ProcessPool] = {}


class ProcessPool:
    """``world_size`` spawned processes with an initialised group; nccl: one GPU each, or one
    for all if there are fewer."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        context = mp.get_context("spawn") if backend == "nccl" else forking_context()
        store = Path(tempfile.mkdtemp()) / "store"
        self.inboxes = [context.SimpleQueue() for _ in range(world_size)]
        self.outbox = context.Queue()
        self.processes = [
            context.Process(
                target=_serve,
                args=(rank, world_size, backend, str(store), inbox, self.outbox),
                daemon=True,
            )
            for rank, inbox in enumerate(self.inboxes)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """``function(rank, *args)`` on every rank; results by rank.

        Raises:
            AssertionError: with the traceback of every rank that failed, or on a time-out.
        """
        for inbox in self.inboxes:
            inbox.put((function, args))
        results: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout_s
        while len(results) + len(failures) < len(self.processes):
            try:
                rank, value, error = self.outbox.get(timeout=1)
            except queue.Empty:
                dead = [rank for rank, p in enumerate(self.processes) if not p.is_alive()]
                if not dead and time.monotonic() < deadline:
                    continue
                self.stop()
                missing = sorted(set(range(len(self.processes))) - set(results))
                raise AssertionError(
                    f"ranks {missing} did not finish within {timeout_s} s (dead: {dead}); "
                    f"failures so far: {failures}"
                ) from None
            if error is None:
                results[rank] = value
            else:
                failures.append(f"rank {rank}:\n{error}")
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return [results[rank] for rank in sorted(results)]

    def stop(self) -> None:
        """End the processes; the next ``pool(n)`` starts new ones."""
        for process in self.processes:
            process.kill()
        for key in [key for key, running in _pools.items() if running is self]:
            del _pools[key]


def pool(world_size: int, backend: str = "gloo") -> ProcessPool:
    """The running pool of this size, started when first asked for."""
    key = (world_size, backend)
    if key not in _pools:
        _pools[key] = ProcessPool(world_size, backend)
    return _pools[key]


def forking_context() -> Any:
    """Processes are forked from one that has imported this package from where this one has it."""
    import pytest  # here, because the processes import this module too

    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.pool_imports"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")  # Megatron would import all of the compiler
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context


@atexit.register
def _stop_all() -> None:
    for running in list(_pools.values()):
        running.stop()


_groups: dict[int, Any] = {}


def subgroup(size: int) -> Any:
    """The group of the first ``size`` ranks, made once; every rank must call this."""
    if size not in _groups:
        _groups[size] = dist.new_group(list(range(size)))
    return _groups[size]


def on_subgroup(job: Callable[..., Any]) -> Callable[..., Any]:
    """``job(rank, group, *args)`` as a function of (rank, cp_size, *args) that every rank calls: it
    runs on the first ``cp_size`` ranks, with their group, and does nothing on the others."""

    @functools.wraps(job)
    def run(rank: int, cp_size: int, *args: Any) -> Any:
        group = subgroup(cp_size)
        return job(rank, group, *args) if rank < cp_size else None

    return run


def _serve(rank: int, world_size: int, backend: str, store: str, inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
    if backend == "nccl" and world_size > torch.cuda.device_count():
        os.environ.update(shared_gpu.environment(rank))
        shared_gpu.allow_peer_reads()
    elif backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    while True:
        function, args = inbox.get()
        try:
            outbox.put((rank, function(rank, *args), None))
        except BaseException:
            outbox.put((rank, None, traceback.format_exc()))
