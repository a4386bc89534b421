"""The lines of a steps.csv: all that are whole, up to an iteration."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.run.steps_file import read_steps, steps_until


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
    assert steps_until(tmp_path / "steps.csv", 9) == []
    assert read_steps(write(tmp_path, "")) == []


@pytest.mark.parametrize(
    "content", [b"iteration\n\xff\xfe\n", b'iteration\n"' + b"x" * 200_000 + b'"\n']
)
def test_what_is_no_table_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    with pytest.raises(RecipeError, match=r"steps\.csv must be text .*; restore or remove it"):
        read_steps(path)


def test_lines_end_at_an_iteration_by_its_number(tmp_path: Path) -> None:
    path = write(tmp_path, "iteration,lm_loss\n" + "".join(f"{i},2.0\n" for i in range(1, 12)))
    kept = steps_until(path, 9)
    assert [row["iteration"] for row in kept] == [str(i) for i in range(1, 10)]
    assert steps_until(path, 0) == []


@pytest.mark.parametrize("last", ["12", "12,2.", ",2.0,1.0", "x,2.0,1.0", "-1,2.0,1.0", "1.5,2,1"])
def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path, last: str) -> None:
    path = write(tmp_path, f"iteration,lm_loss,mfu\n11,2.0,0.5\n{last}")
    assert [row["iteration"] for row in steps_until(path, 100)] == ["11"]
