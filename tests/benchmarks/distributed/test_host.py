"""The benchmark of the host's part of a distributed call runs and shows every row."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = "benchmarks.distributed.host"


def test_a_short_run() -> None:
    command = [sys.executable, "-m", PROGRAM, "--calls", "10", "--profile"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\S.*?) +(forward|backward) +[\d.]+ us", done.stdout, re.M)
    plans = ("at once", "local first", "staged, 2")
    assert rows == [(plan, way) for plan in plans for way in ("forward", "backward")]
    assert "dist_attn.py" in done.stdout
