"""Runs pairs_alone.py in a process of its own: Megatron's checks need stand-ins for CUDA, which
change PyTorch for every test after them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.megatron_worker import NO_COMPILER

PAIRS = Path(__file__).parent / "pairs_alone.py"


def test_pairs_of_stock_and_magi() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PAIRS)]
    ended = subprocess.run(
        command, env={**os.environ, **NO_COMPILER}, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0 and "passed" in ended.stdout, ended.stdout[-4000:]
