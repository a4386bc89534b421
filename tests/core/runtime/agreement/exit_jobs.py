"""Small jobs of two or three gloo ranks, and the exit codes of their ranks.

    python -m tests.core.runtime.agreement.exit_jobs [--abort]

A rank is a fork of this process. It attends by the published names and ends as real jobs do: after
`destroy_process_group`, without it, with keys and groups in module globals, with a comparison in
flight for which another rank comes late, or because one rank fails. With --abort, rank 1 aborts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from megatron_magi import magi_attention as api
from megatron_magi.core.runtime.agreement.comparison import compare
from megatron_magi.core.runtime.agreement.signature import Call

ENDINGS = ("destroyed", "not destroyed", "kept", "late", "a rank fails")
TIMEOUT_S = 60
kept: list[Any] = []


def main() -> None:
    torch.set_num_threads(1)  # a fork copies no threads
    ended: dict[str, list[int]] = {}
    for ending in ENDINGS[:1] if "--abort" in sys.argv else ENDINGS:
        codes = run_job(ending, 2 + ENDINGS.index(ending) % 2)
        if codes is None:
            return  # a rank, which ends like any program
        ended[ending] = codes
    print(json.dumps(ended))


def run_job(ending: str, num_ranks: int) -> list[int] | None:
    """Exit codes of the ranks, negative for signals; None in the ranks themselves."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(num_ranks):
            pids.append(os.fork())
            if not pids[-1]:
                sys.excepthook = lambda *error: None  # the failing rank's traceback is expected
                _rank(ending, rank, num_ranks, f"file://{folder}/store")
                return None
        return [_exit_code(pid) for pid in pids]


def _rank(ending: str, rank: int, num_ranks: int, store: str) -> None:
    if rank and "--abort" in sys.argv:
        os.abort()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    group = dist.new_group(list(range(num_ranks))) if num_ranks == 3 else dist.group.WORLD
    cuts = torch.tensor([0, 72, 160], dtype=torch.int32)
    key = api.magi_attn_varlen_key(
        cuts, cuts, 2, 1, 8, pad_size=0, cp_group_or_mesh=group, causal=True
    )
    if ending == "kept":
        kept.extend((key, group))
    q, k, v = (api.dispatch(torch.randn(160, h, 8, requires_grad=True), key) for h in (2, 1, 1))
    out, _ = api.calc_attn(q, k, v, key)
    if ending == "a rank fails" and rank == 0:
        raise RuntimeError("this rank fails")
    api.undispatch(out, key, is_partial_grad=True).sum().backward()
    if ending == "late" and rank:  # comparisons are in flight while rank 0 ends
        time.sleep(1.5)
    compare(Call("plan"), key.plan, group, torch.device("cuda", 0))
    if ending == "destroyed":
        dist.destroy_process_group()


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


if __name__ == "__main__":
    main()
