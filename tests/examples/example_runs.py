"""Starting the examples that print a line with a loss for every step."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launcher.two_ranks import free_port
from tests.megatron_worker import run_jobs_of

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 300


def printed_losses(script: str, processes: int, *flags: str) -> list[float]:
    """Run an example on the CPU, by torchrun if it is to have several processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    start = [*(launcher if processes > 1 else []), str(ROOT / "examples" / script)]
    inherited = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, *start, *flags],
        env={**inherited, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [float(x) for x in re.findall(r"loss (\S+)", run.stdout)]


def printed_by_forks(script: str, sizes: list[int], flags: list[str], folder: Path) -> list[str]:
    """What rank 0 prints with --cp of each size, in processes that have imported Megatron."""
    path = ROOT / "examples" / script
    text = path.read_text()  # in a fork it would not show that Megatron's import is not prepared
    assert text.index("from megatron_magi.adapter") < text.index("from megatron.core")
    jobs = [
        {
            "name": str(size),
            "function": "run_example",
            "kwargs": {"script": str(path), "flags": [f"--cp={size}", *flags], "port": free_port()},
            "world": size,
        }
        for size in sizes
    ]
    results = run_jobs_of(Path(__file__).parent / "example_jobs.py", jobs, folder, TIMEOUT_S)
    return [results[job["name"]]["values"][0] for job in jobs]


def refused_shape(
    script: str,
    cp: int,
    processes: int,
    monkeypatch: pytest.MonkeyPatch,
    output: pytest.CaptureFixture[str],
) -> str:
    """What an example says on every rank of a job whose processes it cannot share out."""
    monkeypatch.setattr(dist, "get_world_size", lambda: processes)
    example = runpy.run_path(str(ROOT / "examples" / script))
    with pytest.raises(SystemExit, match="2"):
        example["mesh_shape"](argparse.ArgumentParser(), cp)
    return output.readouterr().err
