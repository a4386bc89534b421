"""The benchmark of the host's part of a distributed call runs, and puts back what it replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.process_pool import ROOT

SCRIPT = ROOT / "scripts" / "bench_dist_host.py"


def test_a_short_run() -> None:
    command = [sys.executable, str(SCRIPT), "--calls", "10", "--profile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("at once", "local first", "staged, 2"):
        for direction in ("forward", "backward"):
            assert any(line.split(" us")[0].startswith(f"{name:12s} {direction}") for line in done.stdout.splitlines())
    assert "dist_attn.py" in done.stdout
