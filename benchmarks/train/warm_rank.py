"""One rank of a case of pretrain.py: it imports everything first and then waits for its case.

Started by `warm_ranks.WarmRanks`. It reads one line from standard input: JSON of a `Job`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time

READY = "ready for a job"
"""The same line as in warm_ranks.py, which this process need not import."""
IMPORTS = (
    "megatron_magi.launcher",
    "transformer_engine.pytorch",
    "megatron.training",
    "megatron.training.checkpointing",
    "megatron.training.datasets.sft_dataset",
    "megatron.core.models.hybrid.hybrid_model",
    "gpt_builders",
)
"""What a pretrain script imports, which takes most of a short run's time."""


POLL_S = 0.5


def main(megatron: str) -> None:
    """Import, wait for the case, and run it as this process's main program."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    sys.path.insert(0, megatron)
    for name in IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.reconfigure(line_buffering=True)  # a rank that is killed flushes nothing
        print(f"\n{READY}", flush=True)
    line = sys.stdin.readline()
    if not line:
        return  # the pool is closed
    job = json.loads(line)
    os.environ.update(job["environment"])
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = [job["module"], *job["arguments"]]
    runpy.run_module(job["module"], run_name="__main__", alter_sys=True)


def _end_with(pool: int) -> None:
    """End this process and those that it started when the pool's process has gone, however it
    ended: a rank that stayed would keep its GPU from whatever runs next."""
    while os.getppid() == pool:
        time.sleep(POLL_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
