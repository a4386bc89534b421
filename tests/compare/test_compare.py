"""Curves of a run: what is read, what a shorter run keeps, and its speed."""

import csv
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.compare.read_run import read_run


def write(folder: Path, columns: dict[str, list[object]]) -> None:
    folder.mkdir()
    with (folder / "steps.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(columns)
        rows.writerows(zip(*columns.values(), strict=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    steps = list(range(41, 71))
    write(tmp_path / "run", {
        "iteration": list(steps), "lm_loss": [float(i) for i in steps], "grad_norm": [1.0] * 30,
        "loss_tokens": [100] * 29 + [7], "step_seconds": [0.5] * 30,
        "tokens_per_second": [1.0] * 10 + [1000.0] * 20, "num_processes": [4] * 30,
        "validation_loss": [i / 10 if i % 10 == 0 else "" for i in steps],
    })  # fmt: skip
    return tmp_path / "run"


def test_a_run_is_read_as_it_was_written(folder: Path) -> None:
    run = read_run(folder)
    assert (run.name, run.first_iteration, run.num_processes) == ("run", 41, 4)
    assert run.loss_tokens == 100  # the last step's few tokens are not the usual number
    assert run.validation == {50: 5.0, 60: 6.0, 70: 7.0}
    assert run.median_tokens_per_second == 1000


def test_a_shorter_run_keeps_what_it_had_by_then(folder: Path) -> None:
    run = read_run(folder).first(19)
    assert run.loss.tolist() == [float(i) for i in range(41, 60)] and len(run.grad_norm) == 19
    assert run.validation == {50: 5.0}
    assert run.median_tokens_per_second == np.median([1.0] * 9 + [1000.0] * 9)
    assert read_run(folder).first(1).median_tokens_per_second == 1.0


def test_columns_of_older_runs_may_be_missing(tmp_path: Path) -> None:
    columns = ("iteration", "lm_loss", "grad_norm", "step_seconds", "tokens_per_second")
    write(tmp_path / "old", {name: [1, 2] for name in columns})
    run = read_run(tmp_path / "old")
    assert (run.num_processes, run.validation, run.loss_tokens) == (None, {}, 1.0)
