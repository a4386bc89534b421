"""The script that holds a stopped and resumed run to the bits of a whole one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.conftest import packed_data

pytestmark = pytest.mark.slow  # the own trainer, which is changed no more

__all__ = ["packed_data"]
ROOT = Path(__file__).parents[2]
PROGRAM = "tools.check_resume"


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = [os.environ.get("PYTHONPATH"), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, "-m", PROGRAM, *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_a_run_on_the_cpu_goes_on_with_equal_bits(tmp_path: Path, packed_data: Path) -> None:
    record = tmp_path / "record.json"
    ran = run(
        tmp_path, "--stop-after", "2", "--record", str(record), "tiny_llama_cpu",
        f"data.path={packed_data}", "train.iterations=12", "data.seq_length=64",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (found,) = json.loads(record.read_text())["rows"]
    assert found["weights_equal"] and found["unequal_steps"] == []
    assert 2 <= found["stopped_after"] < found["steps"] == 12 and found["tensors"] > 20


def test_a_recipe_that_does_not_train_is_one_line(tmp_path: Path) -> None:
    ran = run(tmp_path, "tiny_llama_cpu", "data.path=nowhere")
    assert ran.returncode == 2
    assert "must train to its end" in ran.stderr and "Traceback" not in ran.stderr
