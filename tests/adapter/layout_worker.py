"""Runs jobs in forked worlds of gloo processes; `python layout_worker.py JOBS.json RESULTS.json`.

Importing Megatron takes seconds, so it is imported once, here, and every job forks its processes
from this one: fresh state per job, no import. A job is {"name", "function", "kwargs", "world"};
its result is {"values": [what each rank returned]} or {"error": text}. A world that is not done
after its time-out is killed and reported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_magi.adapter.cpu import install_cpu_runtime

assert install_cpu_runtime(), "these jobs run on the CPU: hide the GPUs by CUDA_VISIBLE_DEVICES="
import adapter_jobs  # noqa: E402

JOB_TIMEOUT_S = 100


def main(jobs_file: str, results_file: str) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for job in json.loads(Path(jobs_file).read_text()):
        started = time.monotonic()
        results[job["name"]] = run_world(job)
        results[job["name"]]["seconds"] = round(time.monotonic() - started, 2)
        Path(results_file).write_text(json.dumps(results))


def run_world(job: dict[str, Any]) -> dict[str, Any]:
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork.Process(target=run_rank, args=(job, rank, folder), daemon=True)
            for rank in range(job["world"])
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
            if any(p.exitcode not in (None, 0) for p in ranks):
                deadline = min(deadline, time.monotonic() + 5)
        hung = [rank for rank, p in enumerate(ranks) if p.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
        return collect(job, folder, hung)


def collect(job: dict[str, Any], folder: str, hung: list[int]) -> dict[str, Any]:
    answers = []
    for rank in range(job["world"]):
        path = Path(folder) / f"{rank}.json"
        answers.append(json.loads(path.read_text()) if path.exists() else {"error": "no answer"})
    errors = [f"rank {r}: {a['error']}" for r, a in enumerate(answers) if "error" in a]
    if errors:
        return {"error": "\n".join(errors) + (f"\nhung ranks: {hung}" if hung else "")}
    return {"values": [a["value"] for a in answers]}


def run_rank(job: dict[str, Any], rank: int, folder: str) -> None:
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=job["world"],
            timeout=timedelta(seconds=60),
        )
        answer = {"value": getattr(adapter_jobs, job["function"])(**job["kwargs"])}
        code = 0
    except BaseException:
        answer, code = {"error": traceback.format_exc()}, 1
    temporary = Path(folder) / f"{rank}.tmp"
    temporary.write_text(json.dumps(answer))
    temporary.rename(Path(folder) / f"{rank}.json")
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip teardown: gloo threads of a broken world may wait for peers that are gone.
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
