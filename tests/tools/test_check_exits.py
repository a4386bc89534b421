"""Ranks end cleanly, and the script would see it if they did not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "tools.check_exits"


def run(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    start = f"import sys; import {PROGRAM} as c\n"
    command = ["-c", f"{start}{code}\nsys.exit(c.main())"] if code else ["-m", PROGRAM]
    return subprocess.run(
        [sys.executable, *command, *words], capture_output=True, text=True, timeout=150
    )


@pytest.mark.slow
def test_ranks_end_cleanly(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    ran = run("--exits", "12", "--record", str(record))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (seen,) = json.loads(record.read_text())["rows"]
    assert seen["exits"] >= 12 and seen["unclean"] == {}
    endings = {name.partition(":")[0] for name in seen["exits_by_ending_and_code"]}
    assert endings == {"destroyed", "not destroyed", "kept", "late", "a rank fails"}


def test_an_abort_is_seen() -> None:
    aborts = "import os; c._rank = lambda job, rank, folder: os.abort() if rank else None"
    ran = run("--exits", "2", code=aborts)
    assert ran.returncode == 1
    assert json.loads(ran.stdout)["unclean"].keys() == {"destroyed: -6"}
