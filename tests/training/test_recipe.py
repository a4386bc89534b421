"""Recipes: every key is a field, every error says what to do."""

from __future__ import annotations

import inspect
import re
from dataclasses import is_dataclass
from operator import attrgetter
from pathlib import Path

import pytest

from megatron_magi.training.recipe.recipe import load_recipe, schema_of, to_yaml
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import DataConfig, RunValues
from tests.training.small_recipes import MINIMAL, Bad, check_refused, load


def test_values_come_from_defaults_then_file_then_overrides(tmp_path: Path) -> None:
    text = MINIMAL + "train: {iterations: 7}\nmagi: {chunk_size: 64}\n"
    config = load(tmp_path, text, "train.seed=5", "optimizer.lr=1e-3", "magi.chunk_size=null")
    assert (config.train.iterations, config.train.seed) == (7, 5)
    assert config.optimizer.lr == 1e-3
    assert config.magi.chunk_size is None
    assert config.model == RunConfig(data=config.data).model


def test_every_key_of_a_recipe_has_a_sentence() -> None:
    """Below its field, where who looks for a key finds it."""
    for key, kind in schema_of(RunConfig):
        if is_dataclass(kind):
            continue
        section, _, name = key.rpartition(".")
        values = attrgetter(section)(RunConfig(data=DataConfig(path="x"))) if section else None
        source = inspect.getsource(type(values) if section else RunValues)
        assert re.search(rf'^    {name}: [^\n]+\n\n?    """', source, re.MULTILINE), key


def test_a_written_recipe_reads_back_equal(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "parallel.vpp=2", "parallel.pp=2", "data.window=5")
    assert load(tmp_path, to_yaml(config)) == config


def test_known_keys_are_dotted_and_complete() -> None:
    kinds = dict(schema_of(RunConfig))
    assert {"name", "model", "model.num_layers", "magi.overlap_degree", "data.path"} <= set(kinds)
    assert is_dataclass(kinds["model"]) and kinds["model.num_layers"] is int


@pytest.mark.parametrize("word", ["off", "Off", "false", "'off'"])
def test_the_word_off_is_not_a_boolean(tmp_path: Path, word: str) -> None:
    """YAML 1.1 reads off as false."""
    model = f"model: {{fused: {word}}}\n"
    assert load(tmp_path, MINIMAL + model).model.fused == "off"
    assert load(tmp_path, MINIMAL, f"model.fused={word}").model.fused == "off"
    assert load(tmp_path, MINIMAL + model, "model.fused=auto").model.fused == "auto"
    again = load(tmp_path, to_yaml(load(tmp_path, MINIMAL + model)))
    assert again.model.fused == "off"


def test_a_boolean_stays_one(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "model.tie_embeddings=off", "log.csv=off")
    assert config.model.tie_embeddings is False and config.log.csv is False


BAD = [
    Bad("typo", ("model.num_layer=3",), ("got 'model.num_layer'", "did you mean 'model.num_lay")),
    Bad("wrong_section", ("train.lr=1",), ("got 'train.lr'", "did you mean 'optimizer.lr'")),
    Bad("typo_in_section", ("optimiser.lr=1",), ("got 'optimiser'", "did you mean 'optimizer'")),
    Bad("magi_typo", ("magi.chunksize=1",), ("did you mean 'magi.chunk_size'",)),
    Bad("magi_of_costs", ("magi.tile_q=64",), ("did you mean 'magi.costs.tile_q'?",)),
    Bad("hopeless_key", ("model.zzz=1",), ("known here: model.num_layers",)),
    Bad("section_as_value", ("model=3",), ("'model' must be a section",)),
    Bad("not_a_number", ("train.iterations=many",), ("train.iterations must have the type",)),
    Bad("not_a_choice", ("attention=flash",), ("attention must", "magi")),
    Bad("no_equals", ("train.iterations",), ("must look like section.key=value",)),
    Bad("fused", ("model.fused=on",), ("model.fused must have the type", "['auto', 'off']")),
    Bad("half", ("train.iterations=3.9",), ("train.iterations must have the type",)),
    Bad("true", ("train.iterations=true",), ("train.iterations must have the type", "True")),
    Bad("scale_true", ("optimizer.lr=true",), ("optimizer.lr must have the type", "True")),
    Bad("half_dump", ("train.dump_gradients=[1.5]",), ("dump_gradients", "1.5")),
    Bad(
        "magi_nan", ("magi.max_imbalance=nan",), ("max_imbalance must be >= 1.0 or None, got nan",)
    ),
    Bad("magi_true", ("magi.costs.tile_q=true",), ("magi.costs.tile_q must have the type",)),
    Bad(
        "magi_value",
        ("magi.max_imbalance=0.5",),
        ("max_imbalance must be >= 1.0 or None",),
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda b: b.name)
def test_a_bad_key_or_value_is_one_clear_error(tmp_path: Path, bad: Bad) -> None:
    check_refused(tmp_path, bad)


@pytest.mark.parametrize(
    ("text", "says"),
    [("- a\n- b\n", "must be a mapping"), ("a: [\n", "must be YAML")],
    ids=["list", "broken"],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        load(tmp_path, text)


def test_a_missing_file() -> None:
    with pytest.raises(RecipeError, match=r"got nowhere\.yaml, which is neither"):
        load_recipe("nowhere.yaml")


def test_yaml_words_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"name must be text, got false.*quotes"):
        load(tmp_path, "name: off")
    with pytest.raises(RecipeError, match=r"log\.dir must be text, got true.*quotes"):
        load(tmp_path, "log: {dir: yes}")
