"""The worker process that runs jobs in worlds of forked gloo processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megatron_magi.adapter  # noqa: F401  prepares megatron before a test imports it

HERE = Path(__file__).parent
WORKER_TIMEOUT_S = 280


@pytest.fixture(scope="session")
def run_jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Any]], dict[str, Any]]:
    """Run jobs (see layout_worker) and return their results by name."""

    def run(jobs: list[dict[str, Any]]) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("jobs")
        (folder / "jobs.json").write_text(json.dumps(jobs))
        root = str(HERE.parent.parent)
        # The path of a tried megatron-core stays in front; the package comes from this checkout.
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
        worker = subprocess.Popen(
            [
                sys.executable,
                "layout_worker.py",
                f"{folder}/jobs.json",
                f"{folder}/out.json",
                "adapter_jobs",
            ],
            cwd=HERE,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": path,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = worker.communicate(timeout=WORKER_TIMEOUT_S)
        finally:
            # The worker and every process it forked, also when the time is over.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        assert worker.returncode == 0, output[-4000:]
        answers: dict[str, Any] = json.loads((folder / "out.json").read_text())
        answers["output"] = output
        return answers

    return run
