"""Which checkpoint a run takes, which it keeps, and what an unfinished one leaves behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_magi.training.checkpoint.checkpoint_folder import (
    choose_checkpoint,
    finish,
    finish_weights,
    list_checkpoints,
    open_partial,
)
from megatron_magi.training.process.whole_files import partial_folder
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig
from tests.training.full_disk import FULL, needs_full, no_room
from tests.training.small_checkpoints import change, config_of, cut, shorter_tensors, write


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    return partial(config_of, tmp_path)


# What is taken.


def test_a_half_written_checkpoint_is_never_taken(config: Callable[..., RunConfig]) -> None:
    latest = config()
    whole = write(latest, 5)
    unfinished = open_partial(whole.parent, 6)
    (unfinished / "weights").write_text("w")
    (unfinished / "checkpoint.json").write_text((whole / "checkpoint.json").read_text())
    found = choose_checkpoint(latest).checkpoint
    assert found is not None and found.path == whole
    assert [c.iteration for c in list_checkpoints(whole.parent)] == [5]
    assert choose_checkpoint(config(load=str(whole))).checkpoint == found
    with pytest.raises(RecipeError, match="needs a whole checkpoint"):
        choose_checkpoint(config(load=str(unfinished)))
    assert open_partial(whole.parent, 6) == unfinished
    assert not list(unfinished.iterdir())


def test_a_save_over_an_old_one_replaces_it(config: Callable[..., RunConfig]) -> None:
    first = write(config(), 5)
    (first / "old").write_text("")
    assert write(config(), 5) == first
    assert not (first / "old").exists()


@pytest.mark.parametrize("load", ["latest", "nowhere"])
def test_nothing_to_load_is_one_clear_error(config: Callable[..., RunConfig], load: str) -> None:
    wanted = config(load=load)
    with pytest.raises(RecipeError, match=f"checkpoint.load={load} needs a whole checkpoint, got"):
        choose_checkpoint(wanted)
    open_partial(Path(wanted.log.dir) / "run" / "checkpoints", 7)
    if load == "latest":
        with pytest.raises(RecipeError, match=r"unfinished: iter_0000007.partial"):
            choose_checkpoint(wanted)
    assert choose_checkpoint(config(load="auto")).checkpoint is None
    assert choose_checkpoint(config(load=None)).checkpoint is None


# The order.


def save_at(path: Path, seconds: float) -> None:
    """As a clock that is off would have dated it."""
    change(path, lambda facts: facts.update(saved_at=seconds))
    for entry in (path, *path.iterdir()):
        os.utime(entry, (seconds, seconds))


def test_a_clock_that_stepped_back_changes_nothing(config: Callable[..., RunConfig]) -> None:
    keep2 = config(keep=2)
    for iteration in (10, 20, 30):
        path = write(keep2, iteration)
        save_at(path, 4e9 - iteration)  # far ahead of now, and each before the last
    assert [c.iteration for c in list_checkpoints(path.parent)] == [20, 30]
    newest = write(keep2, 40)
    assert [c.iteration for c in list_checkpoints(path.parent)] == [30, 40]
    found = choose_checkpoint(keep2).checkpoint
    assert found is not None and (found.path, found.consumed_samples) == (newest, 320)
    assert found.layout == "tp 1 pp 1 cp 1 dp 4"


def test_iterations_are_numbers_and_no_names(config: Callable[..., RunConfig]) -> None:
    """As text, iter_10000000 would come before iter_9999999."""
    keep1 = config(keep=1)
    write(keep1, 9_999_999)
    path = write(keep1, 10_000_000)
    assert [p.name for p in path.parent.iterdir()] == ["iter_10000000"]


def test_what_was_just_written_stays_among_later_ones_and_latest_stays_ahead(
    config: Callable[..., RunConfig],
) -> None:
    keep2 = config(keep=2)
    for iteration in (10, 20, 30, 5):
        path = write(keep2, iteration)
    assert [c.iteration for c in list_checkpoints(path.parent)] == [5, 20, 30]
    found = choose_checkpoint(keep2).checkpoint
    assert found is not None and found.iteration == 30
    write(keep2, 6)
    assert [c.iteration for c in list_checkpoints(path.parent)] == [6, 20, 30]


@pytest.mark.parametrize("start", [None, "PATH"])
def test_a_start_below_a_later_checkpoint_says_so(
    config: Callable[..., RunConfig], start: str | None
) -> None:
    paths = [write(config(), iteration) for iteration in (10, 20, 30)]
    choice = choose_checkpoint(config(load=start and str(paths[0])))
    (note,) = choice.notes
    later = "iter_0000020, iter_0000030" if start else "iter_0000010, iter_0000020, iter_0000030"
    assert note.startswith(f"note: {paths[0].parent} has {later} of another start, which")
    assert choose_checkpoint(config()).notes == ()


def test_a_kill_while_an_old_one_is_removed_leaves_nothing_that_looks_whole(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep1 = config(keep=1)
    old = write(keep1, 10)
    remove = shutil.rmtree

    def killed(path: Path, **options: Any) -> None:
        if "0000010" in Path(path).name and not options:
            (Path(path) / "tensors.distcp").unlink()
            raise KeyboardInterrupt
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write(keep1, 20)
    monkeypatch.undo()
    assert not old.exists()
    assert choose_checkpoint(keep1).notes == ()
    write(keep1, 30)
    assert [p.name for p in old.parent.iterdir()] == ["iter_0000030"]


# What must fit.


def write_weights(config: RunConfig, path: Path) -> Path:
    unfinished = partial_folder(path)
    (unfinished / "weights").write_text("w")
    return finish_weights(unfinished, config)


def test_imported_weights_fit_any_precision_and_sharding_but_one_shape(
    config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    weights = write_weights(config(), tmp_path / "llama-3.2")
    assert weights == tmp_path / "llama-3.2" and (weights / "weights").is_file()
    load = {"load": str(weights)}
    fits = config(train={"dtype": "bf16"}, parallel={"distributed_optimizer": True}, **load)
    found = choose_checkpoint(fits).checkpoint
    assert found is not None and (found.weights_only, found.iteration) == (True, 0)
    with pytest.raises(RecipeError, match=r"model.hidden_size 256 \(saved: 128\)"):
        choose_checkpoint(config(model={"hidden_size": 256}, **load))


def test_imported_weights_among_a_runs_checkpoints_are_not_its_own(
    config: Callable[..., RunConfig],
) -> None:
    keep1 = config(keep=1)
    own = write(keep1, 5)
    weights = write_weights(keep1, own.parent / "iter_0000009")
    found = choose_checkpoint(keep1).checkpoint
    assert found is not None and found.path == own and not found.weights_only
    newer = write(keep1, 6)
    assert sorted(own.parent.iterdir()) == [newer, weights]
    shutil.rmtree(newer)
    assert choose_checkpoint(config(load="auto")).checkpoint is None


# Damage.


def test_only_damage_that_matters_is_told_and_all_of_it(config: Callable[..., RunConfig]) -> None:
    paths = [write(config(), iteration) for iteration in (10, 20, 30, 40)]
    for index in (0, 2, 3):
        cut(paths[index])
    choice = choose_checkpoint(config())
    assert choice.checkpoint is not None and choice.checkpoint.path == paths[1]
    assert [str(paths[i]) in note for i, note in zip((3, 2), choice.notes, strict=True)] == [
        True,
        True,
    ]


def test_retention_counts_whole_ones_and_touches_no_damaged_one(
    config: Callable[..., RunConfig],
) -> None:
    keep2 = config(keep=2)
    write(keep2, 10)
    cut(write(keep2, 20))
    path = write(keep2, 30)
    names = [p.name for p in sorted(path.parent.iterdir())]
    assert names == ["iter_0000010", "iter_0000020", "iter_0000030"]


def test_a_run_that_went_on_replaces_the_damaged_one(config: Callable[..., RunConfig]) -> None:
    write(config(), 10)
    shorter_tensors(write(config(), 20))
    again = write(config(), 20)
    choice = choose_checkpoint(config())
    assert choice.checkpoint is not None and (choice.checkpoint.path, choice.notes) == (again, ())


def test_what_could_not_be_finished_is_removed(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config()
    whole = write(run, 5)
    monkeypatch.setattr(
        "megatron_magi.training.checkpoint.checkpoint_folder.replace_folder", no_room
    )
    with pytest.raises(RecipeError, match="No space left"):
        write(run, 10)
    assert [path.name for path in whole.parent.iterdir()] == [whole.name]


# No room.


@needs_full
def test_a_disk_that_is_full_for_the_last_file_leaves_the_last_checkpoint(
    config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    finish(open_partial(tmp_path, 2), config(), 2, 4, 1)
    unfinished = open_partial(tmp_path, 4)
    (unfinished / "checkpoint.json").symlink_to(FULL)
    with pytest.raises(RecipeError) as error:
        finish(unfinished, config(), 4, 8, 1)
    assert "got [Errno 28] No space left on device in " in str(error.value)
    assert str(error.value).endswith(f"checkpoint.load={tmp_path / 'iter_0000002'}")
    assert [p.name for p in tmp_path.iterdir()] == ["iter_0000002"]


def test_a_failed_rename_keeps_what_was_there(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finish(open_partial(tmp_path, 2), config(), 2, 4, 1)
    unfinished = open_partial(tmp_path, 4)
    monkeypatch.setattr(Path, "rename", no_room)
    with pytest.raises(RecipeError, match="iteration 4 needs room"):
        finish(unfinished, config(), 4, 8, 1)
    assert [c.path for c in list_checkpoints(tmp_path)] == [whole]
    assert [p.name for p in tmp_path.iterdir()] == [whole.name]


def test_a_folder_in_a_file_is_no_place_for_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match="iteration 4 needs room and a folder that it can write"):
        open_partial(tmp_path / "file" / "checkpoints", 4)


def test_what_a_kill_left_unfinished_goes_with_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "iter_0000002.partial").mkdir()
    (tmp_path / "mine.partial").mkdir()
    open_partial(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000004.partial", "mine.partial"]
