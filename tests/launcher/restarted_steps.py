"""What ranks of restart_job.py print, and what a restart must have left of it."""

from __future__ import annotations

import re
from pathlib import Path

JOB = str(Path(__file__).parent / "restart_job.py")
SAVED, FAULTY = 2, 3
"""Iterations: a save follows every second one, and the fault comes after this many."""

Steps = list[tuple[int, float, float]]
"""(iteration, loss, gradient norm)"""


def steps_of(output: str) -> Steps:
    """All steps that a rank printed, none of which has compared in a group that was destroyed."""
    found = re.findall(r"^step (\d+): (\S+) (\S+) (\d+)$", output, re.MULTILINE)
    assert {stale for *_, stale in found} == {"0"}, output[-3000:]
    return [(int(i), float(loss), float(norm)) for i, loss, norm, _ in found]


def assert_restarted(outputs: list[str], whole: Steps) -> None:
    """Both ranks went back to the last save, and each step is that of the run without a fault."""
    for output in outputs:
        assert steps_of(output) == whole[:FAULTY] + whole[SAVED:]
        assert "destroyed" not in output


def assert_one_restart(outputs: list[str]) -> None:
    """nvidia_resiliency_ext ended both ranks' runs once, because of the fault of the second."""
    assert "a fault that the test makes" in outputs[1]
    assert [output.count(" term_ex: ") for output in outputs] == [1, 1], "one restart was enough"
