"""A run of a pretrain script in two processes, each started by itself."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.train.pretrain_cases import words
from tests.launcher.layouts import SMALL_SCRIPT
from tests.megatron_worker import NO_COMPILER

ROOT = Path(__file__).parents[2]
Program = tuple[str, ...]
RUN: Program = ("-m", "megatron_magi.run", str(SMALL_SCRIPT))
WITHOUT_CUDA = {
    "PYTHONPATH": str(Path(__file__).parent / "no_cuda"),
    "CUDA_VISIBLE_DEVICES": "",
    **NO_COMPILER,
    "LAUNCHER_TEST_WITHOUT_CUDA": "1",
}


class Ranks:
    """Two processes of one run."""

    def __init__(
        self,
        flags: dict[str, Any],
        program: Program = RUN,
        environment: dict[str, str] = WITHOUT_CUDA,
        timeout_s: float = 200,
        folder: Path | None = None,
    ) -> None:
        """
        Args:
            program: what Python runs, a script included, before the flags.
            environment: variables of both processes; PYTHONPATH is put before the one that is set.
            timeout_s: they are killed when they take longer.
            folder: where rank0.log and rank1.log are written; a new one by default.
        """
        self.program, self.environment, self.timeout_s = program, environment, timeout_s
        self._own_folder = tempfile.TemporaryDirectory()
        folder = folder or Path(self._own_folder.name)
        self.logs = [folder / f"rank{rank}.log" for rank in range(2)]
        port = str(free_port())
        self.processes = [self._start(rank, port, flags) for rank in range(2)]

    def _start(self, rank: int, port: str, flags: dict[str, Any]) -> subprocess.Popen[bytes]:
        given = self.environment
        paths = [given.get("PYTHONPATH"), os.environ.get("PYTHONPATH"), str(ROOT)]
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": "1",
            **given,
            **{name: str(value) for name, value in place.items()},
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        command = [sys.executable, *self.program, *words(flags)]
        with self.logs[rank].open("w") as log:
            return subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def outputs(self) -> list[str]:
        """What they printed, once both have ended well."""
        ended = self._end_before(time.monotonic() + self.timeout_s)
        self.kill()
        outputs = [log.read_text() for log in self.logs]
        assert ended, "not at the end in time:" + "".join(f"\n\n{x[-3000:]}" for x in outputs)
        for process, output in zip(self.processes, outputs, strict=True):
            assert process.returncode == 0, output[-3000:]
        return outputs

    def _end_before(self, deadline: float) -> bool:
        try:
            for process in self.processes:
                process.wait(deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill_at(self, *words: str) -> None:
        """Kill both, and whatever they started, as soon as the first one has printed all these."""
        while not all(each in self.logs[0].read_text() for each in words):
            assert self.processes[0].poll() is None, f"it never printed all of {words!r}"
            time.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """Kill both, and whatever they started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """The first of three ports in a row that nobody has: for a restart Megatron takes the next two
    as well. They are below those that a system gives to whoever asks for any."""
    while True:
        first = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + 3):
                stack.enter_context(socket.socket()).bind(("", port))
            return first
