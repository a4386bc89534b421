"""Whether ranks end cleanly: many small jobs of two or three gloo ranks, and how each rank ended.

    python -m tools.check_exits --exits 500 --record FILE.json

Each rank imports nothing new (it is a fork of this process), makes a key by the published names,
attends forward and backward and ends the way real jobs do: after ``destroy_process_group``, without
it, with keys and groups still in module globals, with a comparison under way for which another
rank comes late, or because one rank fails in the middle. The exit code must be 0, or 1 on ranks of
a job that failed; a signal (SIGABRT: -6) is a defect.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser

ENDINGS = ("destroyed", "not destroyed", "kept", "late", "a rank fails")
TIMEOUT_S = 60
kept: list[Any] = []


@dataclass(frozen=True)
class Job:
    num_ranks: int
    ending: str
    seed: int


def main() -> int:
    args = _arguments()
    _import_once()
    rng = random.Random(args.seed)
    counts: collections.Counter[tuple[str, int]] = collections.Counter()
    started, number = time.monotonic(), 0
    while sum(counts.values()) < args.exits:
        job = Job(rng.choice((2, 3)), ENDINGS[number % len(ENDINGS)], number)
        codes = run_job(job)
        if codes is None:
            return 0  # a rank: it has done its work and ends like any program
        counts.update((job.ending, code) for code in codes)
        number += 1
    bad = {
        f"{ending}: {code}": n for (ending, code), n in counts.items() if not is_clean(ending, code)
    }
    result = {
        "jobs": number,
        "exits": sum(counts.values()),
        "seconds": round(time.monotonic() - started, 1),
        "exits_by_ending_and_code": {f"{e}: {c}": n for (e, c), n in sorted(counts.items())},
        "unclean": bad,
    }
    print(json.dumps(result, indent=1))
    if args.record:
        _write_record(args.record, result)
    return 1 if bad else 0


def is_clean(ending: str, code: int) -> bool:
    return code == 0 or (code == 1 and ending == "a rank fails")


def run_job(job: Job) -> list[int] | None:
    """Exit codes of the ranks, negative for signals; None in the ranks themselves."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(job.num_ranks):
            pid = os.fork()
            if pid == 0:
                _rank(job, rank, folder)
                return None
            pids.append(pid)
        return [_exit_code(pid) for pid in pids]


def _rank(job: Job, rank: int, folder: str) -> None:
    """What a user's script does between its imports and its end."""
    sys.excepthook = lambda *error: None  # the failing ranks' tracebacks are expected
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=job.num_ranks
    )
    _attend(job, rank)
    if job.ending == "destroyed":
        dist.destroy_process_group()


def _attend(job: Job, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from megatron_magi import magi_attention as api
    from megatron_magi.core.runtime.agreement.comparison import compare
    from megatron_magi.core.runtime.agreement.signature import Call

    cuts = torch.tensor([0, 64 + 8 * (job.seed % 5), 160], dtype=torch.int32)
    everybody = dist.group.WORLD
    group = dist.new_group(list(range(job.num_ranks))) if job.seed % 2 else everybody
    key = api.magi_attn_varlen_key(
        cuts, cuts, 2, 1, 8, pad_size=0, cp_group_or_mesh=group, causal=True
    )
    if job.ending == "kept":
        kept.extend((key, group))
    q, k, v = (api.dispatch(torch.randn(160, h, 8, requires_grad=True), key) for h in (2, 1, 1))
    out, _ = api.calc_attn(q, k, v, key)
    if job.ending == "a rank fails" and rank == 0:
        raise RuntimeError("this rank fails")
    api.undispatch(out, key, is_partial_grad=True).sum().backward()
    if job.ending == "late" and rank:  # comparisons are under way while rank 0 ends
        time.sleep(0.5 * (job.seed % 5))
    compare(Call("plan"), key.plan, group, torch.device("cuda", 0))


def _exit_code(pid: int) -> int:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -int(signal.SIGKILL)


def _write_record(path: Path, result: dict[str, Any]) -> None:
    from benchmarks.lib.command import command_line
    from benchmarks.lib.record import describe

    meta = {"python": platform.python_version(), **describe(command_line(), None)}
    path.write_text(json.dumps({"meta": meta, "rows": [result]}, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = CommandParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--exits", type=int, default=500, help="ranks to see end (default 500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="JSON file to write")
    return parser.parse_args()


def _import_once() -> None:
    """Before the first fork, on one thread: a fork copies no threads."""
    import torch

    torch.set_num_threads(1)
    import megatron_magi.magi_attention  # noqa: F401


if __name__ == "__main__":
    raise SystemExit(guarded(main))
