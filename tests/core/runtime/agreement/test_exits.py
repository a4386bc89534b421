"""Ranks end cleanly, in whichever way a job ends, and an abort would be seen."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.core.runtime.agreement import exit_jobs


def exit_codes(*words: str) -> dict[str, list[int]]:
    command = [sys.executable, "-m", exit_jobs.__name__, *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[int]] = json.loads(ran.stdout)
    return found


@pytest.mark.slow
def test_ranks_end_cleanly() -> None:
    codes = exit_codes()
    failing = codes.pop("a rank fails")
    assert codes.keys() == set(exit_jobs.ENDINGS) - {"a rank fails"}
    assert all(code == 0 for of_job in codes.values() for code in of_job), codes
    assert failing[0] == 1 and set(failing) <= {0, 1}


@pytest.mark.slow
def test_an_abort_is_seen() -> None:
    assert -6 in exit_codes("--abort")["destroyed"]
