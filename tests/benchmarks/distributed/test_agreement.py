"""The benchmark of comparisons runs on gloo, and its figures fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.distributed.agreement", "--device", "cpu"]
    command += ["--ranks", "2"]
    command += ["--calls", "70", "--every-us", "0", "--record", tmp_path / "agreement.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("compare ") and " us, mean " in done.stdout
    record = json.loads((tmp_path / "agreement.json").read_text())
    (row,) = record["rows"]
    assert row["level"] == "compare" and row["n"] == 50
    assert 0 < row["min_us"] <= row["us"] <= row["max_us"]
    assert row["min_us"] <= row["mean_us"] <= row["max_us"]
    assert record["meta"]["calls"] == 70 and "--ranks 2" in record["meta"]["command"]


def test_too_few_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.distributed import agreement

    monkeypatch.setattr(sys, "argv", ["agreement.py", "--ranks", "99"])
    with pytest.raises(SystemExit, match="99 GPUs are needed"):
        agreement.main()
