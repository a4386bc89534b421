"""The CSV goes on where a run goes on; the lines say what a step was."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_magi.compare.steps_file import read_steps
from megatron_magi.training.run.log import RunLog, magi_line, steps_until, validation_line
from tests.training.step_records import config, record, rows


def test_a_resumed_csv_keeps_what_is_before_the_checkpoint(tmp_path: Path) -> None:
    with RunLog(config(tmp_path), True) as log:
        for i in (1, 2, 3, 4):
            log.step(record(i))
    with RunLog(config(tmp_path), True, after_iteration=2) as log:
        log.step(record(3, loss=1.5))
    assert rows(tmp_path) == [("1", "2.0"), ("2", "2.0"), ("3", "1.5")]
    with RunLog(config(tmp_path), True) as log:
        log.step(record(1, loss=7.0))
    assert rows(tmp_path) == [("1", "7.0")]


def test_a_csv_of_before_a_column_was_added_is_continued(tmp_path: Path) -> None:
    with RunLog(config(tmp_path), True) as log:
        log.step(record(1))
    path = tmp_path / "run" / "steps.csv"
    old = [line.rpartition(",")[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join(old) + "\n")
    with RunLog(config(tmp_path), True, after_iteration=1) as log:
        log.step(record(2, validation=3.0))
    assert rows(tmp_path) == [("1", "2.0"), ("2", "2.0")]
    assert path.read_text().splitlines()[-1].endswith(",3.0")


def test_a_silent_rank_writes_nothing(tmp_path: Path) -> None:
    with RunLog(config(tmp_path, tensorboard=True), False) as log:
        log.step(record(1))
    assert not list(tmp_path.iterdir())


def test_the_validation_line_is_megatrons() -> None:
    line = validation_line(record(20, validation=2.5))
    assert line == (
        " validation loss at iteration 20 | lm loss value: 2.500000E+00 |"
        " lm loss PPL: 1.218249E+01 |"
    )


def test_mfu_stands_in_the_line_where_the_gpu_is_known() -> None:
    known, unknown = magi_line(record(1, mfu=0.4567), 9.0), magi_line(record(1), 9.0)
    assert "TFLOP/s per rank: 1 | MFU: 45.7 % | peak memory: 1.00 GiB |" in known
    assert known.replace(" MFU: 45.7 % |", "") == unknown


def test_an_unknown_mfu_is_an_empty_cell(tmp_path: Path) -> None:
    with RunLog(config(tmp_path), True) as log:
        log.step(record(1))
        log.step(record(2, mfu=0.5))
    assert [row["mfu"] for row in read_steps(tmp_path / "run" / "steps.csv")] == ["", "0.5"]


def written(folder: Path, text: str) -> Path:
    path = folder / "steps.csv"
    path.write_text(text)
    return path


def test_lines_end_at_an_iteration_by_its_number(tmp_path: Path) -> None:
    path = written(tmp_path, "iteration,lm_loss\n" + "".join(f"{i},2.0\n" for i in range(1, 12)))
    kept = steps_until(path, 9)
    assert [row["iteration"] for row in kept] == [str(i) for i in range(1, 10)]
    assert steps_until(path, 0) == []


@pytest.mark.parametrize("last", ["12", "12,2.", ",2.0,1.0", "x,2.0,1.0", "-1,2.0,1.0", "1.5,2,1"])
def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path, last: str) -> None:
    path = written(tmp_path, f"iteration,lm_loss,mfu\n11,2.0,0.5\n{last}")
    assert [row["iteration"] for row in steps_until(path, 100)] == ["11"]
