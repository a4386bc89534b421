"""The benchmark of the host's part of a distributed call runs and shows every row."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_dist_host.py"


def test_a_short_run() -> None:
    command = [sys.executable, SCRIPT, "--calls", "10", "--profile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\S.*?) +(forward|backward) +[\d.]+ us", done.stdout, re.M)
    plans = ("at once", "local first", "staged, 2")
    assert rows == [(plan, way) for plan in plans for way in ("forward", "backward")]
    assert "dist_attn.py" in done.stdout
