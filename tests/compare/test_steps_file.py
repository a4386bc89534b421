"""The lines of a steps.csv: all that are whole, up to an iteration."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_magi.compare.run_error import RunError
from megatron_magi.compare.steps_file import read_steps


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "steps.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_lines_are_read_by_their_columns(tmp_path: Path) -> None:
    path = write(tmp_path, "iteration,lm_loss\r\n1,2.5\r\n2,2.25\r\n")
    assert read_steps(path) == [
        {"iteration": "1", "lm_loss": "2.5"},
        {"iteration": "2", "lm_loss": "2.25"},
    ]


def test_a_run_that_left_no_file_has_no_lines(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "steps.csv") == []
    assert read_steps(write(tmp_path, "")) == []


@pytest.mark.parametrize(
    "content", [b"iteration\n\xff\xfe\n", b'iteration\n"' + b"x" * 200_000 + b'"\n']
)
def test_what_is_no_table_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    with pytest.raises(RunError, match=r"steps\.csv must be text .*; restore or remove it"):
        read_steps(path)
