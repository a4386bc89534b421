"""benchmarks/train/trainer.py starts its cases with arguments that they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.train.trainer_kernels import longest_gaps
from tests.training.conftest import packed_data

pytestmark = pytest.mark.slow  # the own trainer, which is changed no more

__all__ = ["packed_data"]
ROOT = Path(__file__).parents[3]
PROGRAM = "benchmarks.train.trainer"


@pytest.mark.slow
def test_a_case_runs_and_is_profiled(tmp_path: Path, packed_data: Path) -> None:
    """On the CPU; what a GPU's case gets, but for the model."""
    overrides = [f"log.dir={tmp_path}", "name=case", "train.iterations=3"]
    overrides += ["optimizer.warmup_iters=0", "log.progress=false", "data.seq_length=64"]
    overrides += [f"data.path={packed_data}"]
    child = ["--data", "none", "--profile", "--child", "-", "tiny_llama_cpu"]
    command = [sys.executable, "-m", PROGRAM, *child, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    summary = json.loads((tmp_path / "case" / "kernels.json").read_text())
    assert 0 < summary["busy_ms"] <= summary["span_ms"] and summary["kernels"]


def test_gaps_are_where_nothing_ran() -> None:
    """Kernels of several streams overlap."""
    kernels = [(0.0, 10e3, "a"), (2e3, 4e3, "b"), (11e3, 12e3, "c"), (15e3, 16e3, "d")]
    assert longest_gaps(kernels) == [
        {"ms": 3.0, "after": "c", "before": "d"}, {"ms": 1.0, "after": "a", "before": "c"}
    ]  # fmt: skip
