"""A run of the small pretrain script in two processes, each started by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.launcher.layouts import SMALL_SCRIPT
from tests.launcher.tiny_flags import words

ROOT = Path(__file__).parents[2]
Program = tuple[str, ...]
RUN: Program = ("-m", "megatron_magi.run")


class Ranks:
    """Two processes of one run."""

    def __init__(self, flags: dict[str, Any], program: Program = RUN) -> None:
        """
        Args:
            program: what Python runs, before the script and its flags.
        """
        self.program = program
        port = str(_free_port())
        self.processes = [self._start(rank, port, flags) for rank in range(2)]

    def _start(self, rank: int, port: str, flags: dict[str, Any]) -> subprocess.Popen[str]:
        paths = [str(Path(__file__).parent / "no_cuda"), os.environ.get("PYTHONPATH"), str(ROOT)]
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
        return subprocess.Popen(
            [sys.executable, *self.program, str(SMALL_SCRIPT), *words(flags)],
            env={
                **os.environ,
                **{name: str(value) for name, value in place.items()},
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "MASTER_ADDR": "127.0.0.1",
                "CUDA_VISIBLE_DEVICES": "",
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "TORCH_COMPILE_DISABLE": "1",
                "OMP_NUM_THREADS": "1",
                "LAUNCHER_TEST_WITHOUT_CUDA": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def outputs(self) -> list[str]:
        """What they printed, once both have ended well."""
        try:
            outputs = [process.communicate(timeout=200)[0] for process in self.processes]
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        for process, output in zip(self.processes, outputs, strict=True):
            assert process.returncode == 0, output[-3000:]
        return outputs

    def kill_at(self, words: str) -> None:
        """Kill both, and whatever they started, as soon as the first one prints these words."""
        stream = self.processes[0].stdout
        assert stream is not None, "started with a pipe"
        assert any(words in line for line in stream), f"it never printed {words!r}"
        self.kill()

    def kill(self) -> None:
        """Kill both, and whatever they started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
