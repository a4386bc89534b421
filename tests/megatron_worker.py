"""Starts the process that imports Megatron once and runs jobs in worlds forked from it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
WORKER = TESTS / "adapter" / "layout_worker.py"


class Answer(dict[str, Any]):
    """A job's result; asking a failed job for its values shows why it failed."""

    def __missing__(self, key: str) -> Any:
        raise AssertionError(f"the job has no {key!r}: {self.get('error', dict(self))}")


def run_jobs_of(
    module: Path,
    jobs: list[dict[str, Any]],
    folder: Path,
    timeout_s: float,
    first: tuple[str | Path, ...] = (),
) -> dict[str, Any]:
    """Results by job name, and "output" with what was printed; see layout_worker.py.

    Args:
        module: file with the jobs' functions.
        folder: for the jobs and their results.
        timeout_s: after it the worker and every process it forked are killed and the test fails.
        first: folders in front of everything on the worker's path, e.g. stand-ins.
    """
    (folder / "jobs.json").write_text(json.dumps(jobs))
    # The path of a tried megatron-core stays in front; the package comes from this checkout.
    path = [*map(str, first), os.environ.get("PYTHONPATH"), str(TESTS.parent), str(module.parent)]
    worker = subprocess.Popen(
        [sys.executable, WORKER, folder / "jobs.json", folder / "out.json", module.stem],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = worker.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
    assert worker.returncode == 0, output[-4000:]
    answers = json.loads((folder / "out.json").read_text())
    return {name: Answer(answer) for name, answer in answers.items()} | {"output": output}
