"""A full disk or a damaged file ends a run in a line on every rank, and what was whole stays so."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import DataConfig, LogConfig
from megatron_magi.training.run.log import RunLog
from tests.training.full_disk import FULL, needs_full, no_room
from tests.training.step_records import record

# Checkpoints, in worlds of two ranks.


@pytest.fixture(scope="module")
def results(
    folder: Path,
    packed_data: Path,
    tiny_recipe: Callable[..., dict[str, Any]],
    run_training_jobs: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    def job(name: str, iterations: int, load: str | None, **more: Any) -> dict[str, Any]:
        sections = {
            "parallel": {"cp": 2},
            "train": {"iterations": iterations},
            "optimizer": {"decay_iters": 8},
            "checkpoint": {"interval": 2, "load": load},
        }
        recipe = tiny_recipe("run", folder, **sections)
        return {"name": name, "function": "train", "kwargs": {"recipe": recipe, **more}, "world": 2}

    def cut(name: str, iteration: int, is_of_earlier_version: bool) -> dict[str, Any]:
        path = folder / "run" / "checkpoints" / f"iter_{iteration:07d}" / "__0_0.distcp"
        kwargs = {"path": str(path), "is_of_earlier_version": is_of_earlier_version}
        return {"name": name, "function": "cut_file", "kwargs": kwargs, "world": 1}

    other = folder / "other_vocabulary"
    for suffix in (".bin", ".idx"):
        content = Path(f"{packed_data}{suffix}").read_bytes()
        changed = content.replace(b"a\0", b"\1\1")  # token 97 becomes 257
        Path(f"{other}{suffix}").write_bytes(changed if suffix == ".bin" else content)
    return run_training_jobs(
        [
            job("first", 2, None),
            job("full", 4, "latest", file_bytes=20_000),
            job("again", 4, "latest"),
            cut("cut_newest", 4, False),
            job("passed_over", 6, "auto"),
            cut("cut_unseen", 6, True),
            job("unreadable", 6, "latest"),
            {
                "name": "vocabulary",
                "function": "train",
                "kwargs": {"recipe": tiny_recipe("other", folder, data={"path": str(other)})},
                "world": 1,
            },
        ]
    )


def both(results: dict[str, Any], name: str) -> list[Any]:
    result = results[name]
    assert "error" not in result, result["error"]
    values: list[Any] = result["values"]
    assert len(values) == 2
    return values


@pytest.mark.slow
def test_a_full_disk_ends_a_run_on_all_ranks_and_keeps_the_last_checkpoint(
    results: dict[str, Any], folder: Path
) -> None:
    checkpoints = folder / "run" / "checkpoints"
    for said in both(results, "full"):
        assert said.startswith("RecipeError: the checkpoint of iteration 4 needs room and a folder")
        assert f"in {checkpoints} (" in said and len(said.splitlines()) == 1
        assert said.endswith(f"and go on with checkpoint.load={checkpoints / 'iter_0000002'}")
    # Where the limit falls decides who meets it: Python's file, torch's writer of archives, or
    # Megatron-Core's worker.
    said = both(results, "full")[0]
    causes = ("[Errno 27] File too large", "RuntimeError: [enforce fail",
              "RuntimeError: An error is caught while starting worker")  # fmt: skip
    assert any(f"got {cause}" in said for cause in causes)
    assert [r[0] for r in both(results, "again")[0]] == [3, 4]


@pytest.mark.slow
def test_a_truncated_shard_is_passed_over_by_all_ranks(
    results: dict[str, Any], folder: Path
) -> None:
    first, second = both(results, "passed_over")
    assert first == second and [r[0] for r in first] == [3, 4, 5, 6]
    assert first[:2] == both(results, "again")[0]  # from iteration 2, bit for bit
    damaged = folder / "run" / "checkpoints" / "iter_0000004"
    line = f"note: damaged checkpoint passed over: {damaged}, where __0_0.distcp has "
    assert results["output"].count(line) == 1


@pytest.mark.slow
def test_what_only_reading_shows_is_one_line_on_all_ranks(
    results: dict[str, Any], folder: Path
) -> None:
    newest = folder / "run" / "checkpoints" / "iter_0000006"
    for said in both(results, "unreadable"):
        assert said.startswith("RecipeError: a checkpoint must be readable and of this model, got ")
        assert said.endswith(f" in {newest}; restore it, or remove it to go on from another")
        assert len(said.splitlines()) == 1


@pytest.mark.slow
def test_a_token_beyond_the_vocabulary_ends_a_run_in_a_line(results: dict[str, Any]) -> None:
    (said,) = results["vocabulary"]["values"]
    assert said.startswith("RecipeError: every token must be one of the 257 ids in the model's voc")


# Files that one process writes.


def config(folder: Path) -> RunConfig:
    log = LogConfig(dir=str(folder), progress=False)
    return RunConfig(data=DataConfig(path="x"), log=log)


@needs_full
def test_a_full_disk_under_the_log_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error, RunLog(config(tmp_path), True) as log:
        log.step(record(1))
        assert log.file is not None
        log.file.close()
        log.file = FULL.open("w")
        log.rows.writer = csv.writer(log.file)
        log.step(record(2))
    assert "the log of a run needs room" in str(error.value)
    assert f"No space left on device in {tmp_path / 'run'}" in str(error.value)
    assert (tmp_path / "run" / "steps.csv").read_text().splitlines()[-1].startswith("1,2.0,")


def test_a_log_without_a_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(RecipeError, match="log of a run needs room and a folder that it can"):
        RunLog(config(tmp_path), True).__enter__()


def test_a_resumed_log_loses_no_line_to_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLog(config(tmp_path), True) as log:
        log.step(record(1))
        log.step(record(2))
    path = tmp_path / "run" / "steps.csv"
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", no_room)
    with pytest.raises(RecipeError, match="No space left"):
        RunLog(config(tmp_path), True, after_iteration=1).__enter__()
    assert path.read_bytes() == before
    monkeypatch.undo()
    path.write_bytes(before[:-1] + b"\n1")  # a full disk cut the line of iteration 12
    with RunLog(config(tmp_path), True, after_iteration=12):
        pass
    assert path.read_bytes() == before
