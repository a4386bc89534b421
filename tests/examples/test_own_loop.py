"""The example loop trains the same model at every context-parallel size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 120


def losses(script: str, processes: int, *flags: str) -> list[float]:
    """Run an example by torchrun on the CPU and read the losses it prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / script), *flags],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert f"cp {processes}," in run.stdout, run.stdout
    return [float(x) for x in re.findall(r"loss (\S+)", run.stdout)]


def test_two_context_ranks_train_what_one_trains() -> None:
    alone, shared = losses("own_loop.py", 1), losses("own_loop.py", 2, "--cp=2")
    assert len(alone) == 5
    assert alone[-1] < alone[0] - 1
    assert shared == pytest.approx(alone, rel=2e-6)
