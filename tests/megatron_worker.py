"""Runs jobs in worlds forked from a process that imported Megatron.

One such process serves every file of tests that pytest's process runs: importing takes seconds. A
call's jobs run in a fork of it, so nothing that they change meets those of the next call.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
WORKER = TESTS / "adapter" / "layout_worker.py"
NO_COMPILER = {"TORCH_COMPILE_DISABLE": "1"}
"""For processes that import Megatron: importing the compiler with it takes seconds."""


class Answer(dict[str, Any]):
    """A job's result; asking a failed job for its values shows why it failed."""

    def __missing__(self, key: str) -> Any:
        raise AssertionError(f"the job has no {key!r}: {self.get('error', dict(self))}")


class Worker:
    """The process that `layout_worker.py` is, with these folders in front of its path."""

    def __init__(self, first: tuple[str, ...]) -> None:
        # The path of a tried megatron-core stays in front; the package comes from this checkout.
        path = [*first, os.environ.get("PYTHONPATH"), str(TESTS.parent)]
        self.process = subprocess.Popen(
            [sys.executable, WORKER],
            env={
                **os.environ,
                **NO_COMPILER,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )

    def run(self, request: dict[str, str], deadline: float) -> int:
        """The exit code of the fork that serves the request.

        Raises:
            TimeoutError: it has not ended; it and all that it started are killed.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        group = self._number(deadline)
        try:
            return self._number(deadline)
        finally:
            kill_group(group)

    def _number(self, deadline: float) -> int:
        """The next line of its answer."""
        assert self.process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            left = max(0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError("the worker did not answer in time")
            got = os.read(self.process.stdout.fileno(), 1)
            if not got:
                raise RuntimeError(f"the worker ended with {self.process.wait()}")
            line += got
        return int(line)

    def stop(self) -> None:
        kill_group(self.process.pid)
        self.process.wait()


_workers: dict[tuple[str, ...], Worker] = {}


def run_jobs_of(
    module: Path,
    jobs: list[dict[str, Any]],
    folder: Path,
    timeout_s: float,
    first: Iterable[str | Path] = (),
) -> dict[str, Any]:
    """Results by job name, and "output" with what was printed; see layout_worker.py.

    Args:
        module: file with the jobs' functions.
        folder: for the jobs and their results.
        timeout_s: after it the worker and every process it forked are killed and the test fails.
        first: folders in front of everything on the worker's path, e.g. stand-ins.
    """
    files = {name: str(folder / name) for name in ("jobs.json", "out.json", "printed.txt")}
    Path(files["jobs.json"]).write_text(json.dumps(jobs))
    request = {
        "jobs": files["jobs.json"],
        "results": files["out.json"],
        "printed": files["printed.txt"],
        "module": str(module),
        "folder": os.getcwd(),
    }
    key = tuple(map(str, first))
    worker = _workers.pop(key, None) or Worker(key)
    try:
        code = worker.run(request, time.monotonic() + timeout_s)
    except BaseException:
        worker.stop()
        raise
    _workers[key] = worker
    output = Path(files["printed.txt"]).read_text()
    assert code == 0, output[-4000:]
    answers = json.loads(Path(files["out.json"]).read_text())
    return {name: Answer(answer) for name, answer in answers.items()} | {"output": output}


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


@atexit.register
def _stop_all() -> None:
    for worker in _workers.values():
        worker.stop()
