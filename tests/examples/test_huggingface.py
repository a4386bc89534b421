"""The example with Transformers trains the same model at every context-parallel size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.example_runs import printed_losses, refused_shape

pytest.importorskip("transformers")
pytestmark = [pytest.mark.timeout(900)]


def test_two_context_ranks_continue_what_one_has_begun(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    start = printed_losses("huggingface.py", 1, "--steps=3", f"--save={folder}")
    assert len(start) == 3 and start[-1] < start[0]
    flags = (f"--model={folder}", "--steps=2")
    alone = printed_losses("huggingface.py", 1, *flags)
    shared = printed_losses("huggingface.py", 2, "--cp=2", *flags)
    assert alone[0] < start[0]
    assert shared == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("cp", "processes", "said"),
    [
        (0, 1, "at least 1 .* got --cp 0 and 1 of them"),
        (-1, 1, "got --cp -1"),
        (2, 3, "divide the number of processes, got --cp 2 and 3"),
        (1, 5, "a step has 4 samples, .* got 5 ranks; start fewer processes"),
    ],
)
def test_processes_that_cannot_be_shared_out_are_an_error(
    cp: int, processes: int, said: str, monkeypatch: Any, capsys: Any
) -> None:
    assert re.search(
        said, refused_shape("huggingface.py", cp, processes, monkeypatch, capsys), re.S
    )
