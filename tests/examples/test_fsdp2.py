"""The FSDP2 example trains the same model at every context-parallel size, also after a resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.example_runs import printed_losses, refused_shape

pytestmark = [pytest.mark.timeout(900)]


@pytest.mark.slow
def test_a_resume_at_another_size_trains_what_one_process_trains(tmp_path: Path) -> None:
    alone = printed_losses("fsdp2.py", 1, "--steps=4")
    assert len(alone) == 4 and alone[-1] < alone[0] - 1
    folder = f"--checkpoint={tmp_path / 'run'}"
    first = printed_losses("fsdp2.py", 2, "--cp=2", "--steps=2", folder)
    assert printed_losses("fsdp2.py", 1, "--steps=1", folder) == []  # and it stays at step 2
    rest = printed_losses("fsdp2.py", 2, "--cp=1", "--steps=4", folder)
    assert (len(first), len(rest)) == (2, 2)
    assert first + rest == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("cp", "processes", "said"),
    [
        (0, 1, "at least 1 .* got --cp 0 and 1 of them"),
        (-1, 1, "got --cp -1"),
        (2, 3, "divide the number of processes, got --cp 2 and 3"),
        (1, 3, "must divide the 4 samples of a step, .* got 3; start another"),
    ],
)
def test_processes_that_cannot_be_shared_out_are_an_error(
    cp: int, processes: int, said: str, monkeypatch: Any, capsys: Any
) -> None:
    assert re.search(said, refused_shape("fsdp2.py", cp, processes, monkeypatch, capsys), re.S)
