"""Ranks that have imported Megatron and TransformerEngine before their case begins.

Importing them takes 15 to 45 s, more than the case itself. So the next cases' processes are started
while a case runs; they touch no GPU until they get theirs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib import shared_gpu

WORKER = ("-m", "benchmarks.train.warm_rank")
"""What Python is told to run; the environment's PYTHONPATH has the folder of `benchmarks`."""
AFTER_A_FAILURE_S = 15
"""For the other ranks to end too, once one has failed."""

READY = "ready for a job"
"""What a process prints when it has imported everything."""

READ_AT_IMPORT = {"NVTE_CPU_OFFLOAD_V1"}
"""Variables that a package reads when it is imported."""

Rank = subprocess.Popen[str]


@dataclass(frozen=True)
class Job:
    """One run of a Python module on some ranks."""

    world: int
    """Ranks."""
    module: str
    """It runs as the main program, e.g. megatron_magi.run."""
    arguments: list[str]
    """Its command line."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables in addition to those of torch.distributed."""

    @property
    def is_cold(self) -> bool:
        """Whether a variable is read when packages are imported, so that no warm rank will do."""
        return not READ_AT_IMPORT.isdisjoint(self.environment)


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    output: str
    """Of all ranks, one after another."""
    failed: bool
    """Whether a rank ended with an error or had to be stopped."""


class WarmRanks:
    """A pool of processes, each for one rank of one job; use it as a context manager."""

    def __init__(
        self, megatron: Path, environment: dict[str, str], ahead: int = 6, quiet: bool = False,
        *, one_gpu: bool = False,
    ) -> None:  # fmt: skip
        """Start the first processes.

        Args:
            megatron: the checkout that they import.
            environment: of the processes; its PYTHONPATH has this repository.
            ahead: how many wait for a job at any time.
            quiet: none imports while a job runs, whose times it would change: all that wait have
                imported before a job begins, and others start only when too few are left.
            one_gpu: the ranks of a job share the first GPU.
        """
        self._megatron, self._environment, self._ahead = megatron, environment, ahead
        self._quiet, self._one_gpu = quiet, one_gpu
        self._waiting: deque[Rank] = deque()
        self._lock = threading.Lock()
        self._refill()

    def __enter__(self) -> WarmRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._waiting:
            _stop(rank)

    def run(self, job: Job, limit_s: float) -> Outcome:
        """Run a job on waiting processes; others start to wait meanwhile.

        Args:
            limit_s: the job is stopped after it.
        """
        ranks = self._take(job)
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / str(rank) for rank in range(job.world)]
            port = str(_free_port())
            for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
                _hand_over(
                    rank, job, {**self._place(number, job.world, port), "output": str(output)}
                )
            failed = _wait(ranks, limit_s)
            texts = [path.read_text(errors="replace") for path in outputs if path.exists()]
        return Outcome("\n".join(texts), failed)

    def _place(self, number: int, world: int, port: str) -> dict[str, str]:
        """What torchrun would tell this rank."""
        return {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **(shared_gpu.environment(number) if self._one_gpu else {}),
        }

    def _take(self, job: Job) -> list[Rank]:
        if job.is_cold:
            return [self._start(job.environment) for _ in range(job.world)]
        with self._lock:  # jobs of several threads may run at once
            if len(self._waiting) < job.world:
                self._refill(job.world)
            if self._quiet:
                for rank in self._waiting:
                    _wait_for_imports(rank)
            ranks = [self._waiting.popleft() for _ in range(job.world)]
            if not self._quiet:
                self._refill()
        return ranks

    def _refill(self, least: int = 0) -> None:
        while len(self._waiting) < max(self._ahead, least):
            self._waiting.append(self._start({}))

    def _start(self, more: dict[str, str]) -> Rank:
        return subprocess.Popen(
            [sys.executable, *WORKER, str(self._megatron)],
            env={**self._environment, **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if self._quiet and not more else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )


def _wait_for_imports(rank: Rank) -> None:
    """Return when the process has said that it waits, or has died."""
    if rank.stdout is not None and not rank.stdout.closed:
        while (line := rank.stdout.readline()) and line.strip() != READY:
            pass
        rank.stdout.close()


def _hand_over(rank: Rank, job: Job, place: dict[str, str]) -> None:
    output = place.pop("output")
    line = {
        "module": job.module,
        "arguments": job.arguments,
        "environment": {**job.environment, **place},
        "output": output,
    }
    assert rank.stdin is not None, "started with a pipe"
    with contextlib.suppress(BrokenPipeError):  # it died early; its exit code says so
        rank.stdin.write(json.dumps(line) + "\n")
        rank.stdin.close()


def _wait(ranks: list[Rank], limit_s: float) -> bool:
    """Wait for all ranks and stop those that do not end; whether any failed."""
    deadline, failed = time.monotonic() + limit_s, False
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
        if not failed and any(rank.poll() not in (None, 0) for rank in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE_S)
    failed |= any(rank.poll() != 0 for rank in ranks)
    for rank in ranks:
        _stop(rank)
    return failed


def _stop(rank: Rank) -> None:
    """The process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()


def _free_port() -> int:
    """One that no job gets twice, below those that the system hands out to other sockets."""
    for port in _ports:
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("warm ranks need a free port from 15000 to 30000, got none; end other jobs")


_ports = iter(range(15_000 + os.getpid() % 10_000, 30_000))
