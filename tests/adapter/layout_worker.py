"""Runs jobs in forked worlds of gloo processes, for `tests/megatron_worker.py`.

A line of standard input is a request: {"jobs": file, "results": file, "printed": file, "module":
file, "folder": the working directory}. The answer is the id of the fork that serves it, and its
exit code once it has ended. `module` has the jobs' functions. Importing Megatron takes seconds, so
it is imported once, and every job forks its processes from this one: fresh state per job, no
import. Nothing heavy is imported at the top, because Megatron's checkpoint writers may spawn
processes that import this file once more.
A job is {"name", "function", "kwargs", "world"}; its result is {"values": [what each rank
returned]} or {"error": text}. A world that is not done after its time-out is killed and reported.
"""

from __future__ import annotations

import gc
import importlib
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

JOB_TIMEOUT_S = 100
AFTER_A_FAILURE_S = 20
"""For the other ranks to end too; on a busy machine they may be seconds behind the first."""


def main() -> None:
    import torch

    from megatron_magi.adapter.cpu import install_cpu_runtime

    assert install_cpu_runtime(), "these jobs run on the CPU: hide GPUs by CUDA_VISIBLE_DEVICES="
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a fork would copy every page that it looks at
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            serve(request)
        reply(child)
        reply(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def reply(number: int) -> None:
    print(number, flush=True)


def serve(request: dict[str, str]) -> None:
    """Run the request's jobs in a process group of their own, and end."""
    os.setpgid(0, 0)
    code = 1
    try:
        printed = os.open(request["printed"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(printed, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(request["folder"])
        module = Path(request["module"])
        sys.path.append(str(module.parent))
        functions = importlib.import_module(module.stem)
        gc.freeze()
        run_jobs(request["jobs"], request["results"], functions)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_jobs(jobs_file: str, results_file: str, functions: Any) -> None:
    results: dict[str, Any] = {}
    for job in json.loads(Path(jobs_file).read_text()):
        started = time.monotonic()
        results[job["name"]] = run_world(job, functions)
        results[job["name"]]["seconds"] = round(time.monotonic() - started, 2)
        Path(results_file).write_text(json.dumps(results))


def run_world(job: dict[str, Any], functions: Any) -> dict[str, Any]:
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            # No daemons: those may not start the processes that write a checkpoint.
            fork.Process(target=run_rank, args=(functions, job, rank, folder))
            for rank in range(job["world"])
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
            if any(p.exitcode not in (None, 0) for p in ranks):
                deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE_S)
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


def run_rank(functions: Any, job: dict[str, Any], rank: int, folder: str) -> None:
    import torch

    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=job["world"],
            timeout=timedelta(seconds=60),
        )
        answer = {"value": getattr(functions, job["function"])(**job["kwargs"])}
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
    main()
