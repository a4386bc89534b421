"""Which checkpoint a run takes: the most iterations whatever the clocks say, and a whole one."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_magi.training.checkpoint.checkpoint_facts import FACTS, NEEDED, DamagedCheckpointError
from megatron_magi.training.checkpoint.checkpoint_folder import (
    checkpoint_to_load,
    choose_checkpoint,
    find_checkpoint,
    finish,
    list_checkpoints,
    open_partial,
)
from megatron_magi.training.recipe.config import RunConfig
from megatron_magi.training.recipe.recipe import build_config
from megatron_magi.training.recipe.recipe_error import RecipeError

Facts = dict[str, Any]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(load: str | None = "latest", keep: int | None = None) -> RunConfig:
        from omegaconf import OmegaConf

        plain = {"data": {"path": "x"}, "log": {"dir": str(tmp_path)}}
        return build_config(
            [OmegaConf.create({**plain, "checkpoint": {"load": load, "keep": keep}})]
        )

    return make


def write(config: RunConfig, iteration: int) -> Path:
    partial = open_partial(Path(config.log.dir) / config.name / "checkpoints", iteration)
    (partial / "tensors.distcp").write_bytes(b"w" * 100)
    return finish(partial, config, iteration, iteration * 8, world_size=4)


def change(path: Path, edit: Callable[[Facts], Any]) -> None:
    facts = json.loads((path / FACTS).read_text())
    edit(facts)
    (path / FACTS).write_text(json.dumps(facts))


def save_at(path: Path, seconds: float) -> None:
    """As a clock that is off would have dated it."""
    change(path, lambda facts: facts.update(saved_at=seconds))
    for entry in (path, *path.iterdir()):
        os.utime(entry, (seconds, seconds))


# The order.


def test_a_clock_that_stepped_back_changes_nothing(config: Callable[..., RunConfig]) -> None:
    keep2 = config(keep=2)
    for iteration in (10, 20, 30):
        path = write(keep2, iteration)
        save_at(path, 4e9 - iteration)  # far ahead of now, and each before the last
    assert [c.iteration for c in list_checkpoints(path.parent)] == [20, 30]
    newest = write(keep2, 40)
    assert [c.iteration for c in list_checkpoints(path.parent)] == [30, 40]
    found = checkpoint_to_load(keep2)
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
    found = checkpoint_to_load(keep2)
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


# Damage.


def cut(path: Path) -> None:
    text = (path / FACTS).read_bytes()
    (path / FACTS).write_bytes(text[: len(text) // 2])


def put(content: bytes) -> Callable[[Path], Any]:
    return lambda path: (path / FACTS).write_bytes(content)


def unreadable(path: Path) -> None:
    (path / FACTS).unlink()
    (path / FACTS).mkdir()


def shorter_tensors(path: Path) -> None:
    (path / "tensors.distcp").write_bytes(b"w" * 99)


def edited(**facts: Any) -> Callable[[Path], Any]:
    return lambda path: change(path, lambda read: read.update(facts))


def without(name: str) -> Callable[[Path], Any]:
    return lambda path: change(path, lambda read: read.pop(name))


def recipe_edited(section: str, name: str, value: Any) -> Callable[[Path], Any]:
    return lambda path: change(path, lambda r: r["recipe"][section].update({name: value}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (cut, "checkpoint.json is no JSON"),
    "empty": (put(b""), "checkpoint.json is no JSON"),
    "not_json": (put(b"iteration 5"), "checkpoint.json is no JSON"),
    "not_text": (put(b"\xff\xfe\x00"), "checkpoint.json is no JSON"),
    "too_deep": (put(b"[" * 100_000), "checkpoint.json is no JSON"),
    "array": (put(b"[]"), "checkpoint.json is no JSON object"),
    "null": (put(b"null"), "checkpoint.json is no JSON object"),
    "no_keys": (put(b"{}"), "needs iteration, a whole number of 0 or more, and has None"),
    "missing": (lambda path: (path / FACTS).unlink(), "cannot be read (No such file"),
    "unreadable": (unreadable, "cannot be read (Is a directory)"),
    "no_samples": (without("consumed_samples"), "needs consumed_samples"),
    "text_iteration": (edited(iteration="20"), "needs iteration"),
    "bool_iteration": (edited(iteration=True), "needs iteration"),
    "half_iteration": (edited(iteration=20.5), "needs iteration"),
    "negative": (edited(consumed_samples=-8), "needs consumed_samples"),
    "no_world": (edited(world_size=0), "needs world_size, a whole number of 1 or more"),
    "no_date": (edited(saved_at="today"), "'today' for saved_at"),
    "odd_flag": (edited(weights_only="no"), "'no' for weights_only"),
    "odd_sizes": (edited(sizes=[1]), "table of bytes"),
    "odd_size": (edited(sizes={"tensors.distcp": "100"}), "table of bytes"),
    "no_recipe": (without("recipe"), "lacks recipe.model.num_layers"),
    "list_recipe": (edited(recipe=[]), "lacks recipe.model.num_layers"),
    "text_section": (
        lambda path: change(path, lambda read: read["recipe"].update(parallel="tp 2")),
        "lacks recipe.parallel.tp",
    ),
    "text_tp": (recipe_edited("parallel", "tp", "2"), "has '2' for recipe.parallel.tp"),
    "no_ranks": (recipe_edited("parallel", "cp", 0), "has 0 for recipe.parallel.cp"),
    "odd_dtype": (recipe_edited("train", "dtype", "fp7"), "has 'fp7' for recipe.train.dtype"),
    "no_tensors": (lambda path: (path / "tensors.distcp").unlink(), "tensors.distcp is missing"),
    "short_tensors": (shorter_tensors, "tensors.distcp has 99 bytes instead of 100"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_newest_is_passed_over_in_one_line(
    config: Callable[..., RunConfig], name: str
) -> None:
    damage, says = DAMAGES[name]
    whole, damaged = write(config(), 10), write(config(), 20)
    damage(damaged)
    for load in ("latest", "auto", str(whole.parent)):
        choice = choose_checkpoint(config(load=load))
        assert choice.checkpoint is not None and choice.checkpoint.path == whole
        (note,) = choice.notes[:1]
        assert note.startswith(f"note: damaged checkpoint passed over: {damaged}, where ")
        assert says in note and len(note.splitlines()) == 1
    # Named, it is what the user wants, and nothing else is.
    with pytest.raises(RecipeError) as error:
        checkpoint_to_load(config(load=str(damaged)))
    if name != "missing":  # then it is no checkpoint of ours at all
        assert isinstance(error.value, DamagedCheckpointError) and says in str(error.value)
        with pytest.raises(DamagedCheckpointError):
            find_checkpoint(damaged)


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("load", ["latest", "auto"])
def test_without_a_whole_one_it_is_an_error_and_no_fresh_start(
    config: Callable[..., RunConfig], name: str, load: str
) -> None:
    damage, says = DAMAGES[name]
    path = write(config(), 5)
    damage(path)
    with pytest.raises(DamagedCheckpointError) as error:
        choose_checkpoint(config(load=load))
    assert str(path) in str(error.value) and says in str(error.value)
    assert str(error.value).endswith("; restore it, or remove that checkpoint")
    sent = pickle.loads(pickle.dumps(error.value))  # to the other ranks
    assert (type(sent), str(sent)) == (DamagedCheckpointError, str(error.value))
    shutil.rmtree(path)
    assert (choose_checkpoint(config(load="auto")).checkpoint) is None


@pytest.mark.parametrize(
    ("section", "name"), [(s, n) for s, (_, names) in NEEDED.items() for n in names]
)
def test_what_is_read_of_the_recipe_is_there(
    config: Callable[..., RunConfig], section: str, name: str
) -> None:
    whole, damaged = write(config(), 10), write(config(), 20)
    change(damaged, lambda read: read["recipe"][section].pop(name))
    choice = choose_checkpoint(config())
    assert choice.checkpoint is not None and choice.checkpoint.path == whole
    assert f"lacks recipe.{section}.{name}" in choice.notes[0]


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


def test_facts_of_other_versions_are_whole(config: Callable[..., RunConfig]) -> None:
    """More keys, and neither sizes nor a date."""
    path = write(config(), 10)
    change(path, lambda read: [read.pop("sizes"), read.pop("saved_at"), read.update(later={})])
    change(path, lambda read: read["recipe"]["model"].update(later=1))
    choice = choose_checkpoint(config())
    assert choice.checkpoint is not None and choice.notes == ()
    assert choice.checkpoint.sizes is None


def test_what_could_not_be_finished_is_removed(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config()
    whole = write(run, 5)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("megatron_magi.training.checkpoint.checkpoint_folder.replace_folder", full)
    with pytest.raises(RecipeError, match="No space left"):
        write(run, 10)
    assert [path.name for path in whole.parent.iterdir()] == [whole.name]
