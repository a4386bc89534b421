"""The facts of a checkpoint are read back, and damage to them or to a file is told in one line."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_magi.training.checkpoint.checkpoint_facts import (
    FACTS,
    NEEDED,
    DamagedCheckpointError,
    check_files,
    read_facts,
    write_facts,
)
from megatron_magi.training.checkpoint.checkpoint_folder import (
    choose_checkpoint,
    find_checkpoint,
)
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig
from tests.training.small_checkpoints import change, config_of, cut, shorter_tensors, write


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    return partial(config_of, tmp_path)


def test_facts_read_back_with_the_size_of_every_other_file(
    config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    partial_folder = tmp_path / "partial"
    (partial_folder / "inner").mkdir(parents=True)
    (partial_folder / "inner" / "weights").write_bytes(b"w" * 7)
    run = config(parallel={"tp": 2, "cp": 2})
    write_facts(partial_folder, run, {"iteration": 3, "consumed_samples": 24, "world_size": 8})
    found = read_facts(partial_folder)
    assert (found.path, found.iteration, found.consumed_samples) == (partial_folder, 3, 24)
    assert found.sizes == {"inner/weights": 7}
    assert found.recipe == json.loads(json.dumps(asdict(run)))
    assert found.layout == "tp 2 pp 1 cp 2 dp 2"
    check_files(found)
    (partial_folder / "inner" / "weights").write_bytes(b"w" * 8)
    with pytest.raises(DamagedCheckpointError) as error:
        check_files(found)
    assert error.value.damage == "inner/weights has 8 bytes instead of 7"


def put(content: bytes) -> Callable[[Path], Any]:
    return lambda path: (path / FACTS).write_bytes(content)


def unreadable(path: Path) -> None:
    (path / FACTS).unlink()
    (path / FACTS).mkdir()


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
    "no_keys": (put(b"{}"), "needs iteration, a whole number from 0 to 2^53, and has None"),
    "missing": (lambda path: (path / FACTS).unlink(), "cannot be read (No such file"),
    "unreadable": (unreadable, "cannot be read (Is a directory)"),
    "no_samples": (without("consumed_samples"), "needs consumed_samples"),
    "text_iteration": (edited(iteration="20"), "needs iteration"),
    "bool_iteration": (edited(iteration=True), "needs iteration"),
    "half_iteration": (edited(iteration=20.5), "needs iteration"),
    "too_many": (edited(consumed_samples=10**30), "needs consumed_samples"),
    "negative": (edited(consumed_samples=-8), "needs consumed_samples"),
    "no_world": (edited(world_size=0), "needs world_size, a whole number from 1 to 2^53"),
    "no_date": (edited(saved_at="today"), "'today' for saved_at"),
    "odd_flag": (edited(weights_only="no"), "'no' for weights_only"),
    "odd_checksum": (edited(data_sha256=5), "5 for data_sha256"),
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
        choose_checkpoint(config(load=str(damaged)))
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


def test_facts_of_other_versions_are_whole(config: Callable[..., RunConfig]) -> None:
    """More keys, and neither sizes nor a date."""
    path = write(config(), 10)
    change(path, lambda read: [read.pop("sizes"), read.pop("saved_at"), read.update(later={})])
    change(path, lambda read: read["recipe"]["model"].update(later=1))
    choice = choose_checkpoint(config())
    assert choice.checkpoint is not None and choice.notes == ()
    assert choice.checkpoint.sizes is None


def test_facts_of_other_versions_are_read(config: Callable[..., RunConfig]) -> None:
    latest = config()
    facts = write(latest, 5) / "checkpoint.json"
    older = json.loads(facts.read_text())
    assert "weights_only" not in older  # what was saved before there were imported weights
    del older["recipe"]["model"]["rope_scaling_factor"]
    facts.write_text(json.dumps({**older, "some_later_fact": 1, "path": "elsewhere"}))
    found = choose_checkpoint(latest).checkpoint
    assert found is not None and (found.path, found.weights_only) == (facts.parent, False)
