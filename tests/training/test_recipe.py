"""Recipes: every key is a field, every error says what to do."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import pytest

from megatron_magi.training.recipe.config import (
    DataConfig,
    LogConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from megatron_magi.training.recipe.config_checks import data_parallel_size
from megatron_magi.training.recipe.recipe import _leaves, known_keys, load_recipe, to_yaml
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_values import RunValues

RECIPES = Path(__file__).parents[2] / "recipes"
MINIMAL = "data: {path: somewhere}\n"


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load_recipe(path, overrides)


def test_values_come_from_defaults_then_file_then_overrides(tmp_path: Path) -> None:
    text = MINIMAL + "train: {iterations: 7}\nmagi: {chunk_size: 64}\n"
    config = load(tmp_path, text, "train.seed=5", "optimizer.lr=1e-3", "magi.chunk_size=null")
    assert (config.train.iterations, config.train.seed) == (7, 5)
    assert config.optimizer.lr == 1e-3
    assert config.magi.chunk_size is None
    assert config.model == RunConfig(data=config.data).model


def test_every_key_of_a_recipe_has_a_sentence() -> None:
    """Below its field, where who looks for a key finds it."""
    for key in known_keys():
        section, _, name = key.rpartition(".")
        values = attrgetter(section)(RunConfig(data=DataConfig(path="x"))) if section else None
        source = inspect.getsource(type(values) if section else RunValues)
        assert re.search(rf'^    {name}: [^\n]+\n\n?    """', source, re.MULTILINE), key


def test_a_written_recipe_reads_back_equal(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "parallel.vpp=2", "parallel.pp=2", "data.window=5")
    assert load(tmp_path, to_yaml(config)) == config


def test_known_keys_are_dotted_and_complete() -> None:
    keys = known_keys()
    assert {"name", "model.num_layers", "magi.overlap_degree", "data.path"} <= set(keys)
    assert "model" not in keys


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


@dataclass(frozen=True)
class Bad:
    name: str
    overrides: tuple[str, ...]
    says: tuple[str, ...]


BAD = [
    Bad("typo", ("model.num_layer=3",), ("got 'model.num_layer'", "did you mean 'model.num_lay")),
    Bad("wrong_section", ("train.lr=1",), ("got 'train.lr'", "did you mean 'optimizer.lr'")),
    Bad("typo_in_section", ("optimiser.lr=1",), ("got 'optimiser'", "did you mean 'optimizer'")),
    Bad("magi_typo", ("magi.chunksize=1",), ("did you mean 'magi.chunk_size'",)),
    Bad("magi_renamed", ("magi.dispatch=lpt",), ("got 'magi.dispatch'", "mean 'magi.balancer'?")),
    Bad("hopeless_key", ("model.zzz=1",), ("known here: model.num_layers",)),
    Bad("section_as_value", ("model=3",), ("'model' must be a section",)),
    Bad("not_a_number", ("train.iterations=many",), ("train.iterations must have the type",)),
    Bad("not_a_choice", ("attention=flash",), ("attention must", "magi")),
    Bad("no_equals", ("train.iterations",), ("must look like section.key=value",)),
    Bad("zero", ("parallel.cp=0",), ("parallel.cp must be positive, got 0",)),
    Bad("heads", ("model.num_query_groups=3",), ("multiple of model.num_query_groups", "4 and 3")),
    Bad("hidden", ("model.hidden_size=130",), ("model.head_dim",)),
    Bad("eod", ("data.eod_token=300",), ("below model.vocab_size, got 300 and 257",)),
    Bad("tp", ("parallel.tp=4",), ("model.num_query_groups must be a multiple of parallel.tp 4",)),
    Bad("pp", ("parallel.pp=3",), ("multiple of pp * vpp = 3, got 4", "use 6 layers")),
    Bad("vpp", ("parallel.vpp=2",), ("parallel.vpp needs parallel.pp of 2 or more",)),
    Bad("ep", ("parallel.ep=2",), ("parallel.ep must be 1",)),
    Bad("sp", ("parallel.sequence_parallel=true",), ("needs parallel.tp of 2 or more",)),
    Bad("gather", ("parallel.overlap_param_gather=true",), ("distributed_optimizer",)),
    Bad("dense", ("attention=dense", "parallel.cp=2"), ("needs parallel.cp 1", "got cp 2")),
    Bad("sdpa", ("attention=sdpa", "parallel.cp=2"), ("sdpa needs parallel.cp 1", "got cp 2")),
    Bad("flex", ("attention=flex_plain", "parallel.cp=2"), ("flex_plain needs parallel.cp 1",)),
    Bad("sdpa_window", ("attention=sdpa", "data.window=9"), ("sdpa needs data.mask", "window 9")),
    Bad(
        "flex_blocks",
        ("attention=flex_plain", "data.mask=block_causal", "data.block_tokens=8"),
        ("flex_plain needs data.mask document or causal", "got block_causal", "attention=dense"),
    ),
    Bad("fused", ("model.fused=on",), ("model.fused must have the type", "['auto', 'off']")),
    Bad("no_block", ("data.mask=block_causal",), ("tokens of a block", "set data.block_tokens")),
    Bad("block", ("data.block_tokens=8",), ("needs data.mask block_causal, got 8 with mask docu",)),
    Bad("blocks", ("data.block_window=2",), ("data.block_window needs data.mask block_causal",)),
    Bad("empty_block", ("data.mask=block_causal", "data.block_tokens=0"), ("must be positive",)),
    Bad(
        "token_window",
        ("data.mask=block_causal", "data.block_tokens=8", "data.window=9"),
        ("got data.window 9 in tokens", "set data.block_window"),
    ),
    Bad("warmup", ("optimizer.warmup_iters=100",), ("below the 100 decay iterations",)),
    Bad("min_lr", ("optimizer.min_lr=1",), ("optimizer.min_lr must lie between 0",)),
    Bad("held_out", ("validation.fraction=1",), ("at least 0 and below 1, got 1.0",)),
    Bad("nothing_held_out", ("validation.interval=5",), ("set validation.fraction=0.02",)),
    Bad("keep", ("checkpoint.keep=0",), ("checkpoint.keep must be positive, got 0",)),
    Bad("no_data", ("data.path=''",), ("data.path must name packed data", "prepare_data")),
    Bad("lr_nan", ("optimizer.lr=nan",), ("optimizer.lr must be a finite number, got nan",)),
    Bad("lr_inf", ("optimizer.lr=inf",), ("optimizer.lr must be a finite number, got inf",)),
    Bad("min_lr_nan", ("optimizer.min_lr=nan",), ("optimizer.min_lr must be a finite", "got nan")),
    Bad("clip", ("optimizer.clip_grad=-inf",), ("optimizer.clip_grad must be a finite number",)),
    Bad("clip_sign", ("optimizer.clip_grad=-1",), ("clip_grad must be at least 0, got -1.0",)),
    Bad("decay", ("optimizer.weight_decay=-0.1",), ("weight_decay must be at least 0, got -0.1",)),
    Bad("beta", ("optimizer.beta2=1",), ("beta2 must be at least 0 and below 1, got 1.0",)),
    Bad("eps", ("optimizer.eps=0",), ("optimizer.eps must be positive, got 0.0; 1e-08 is usual",)),
    Bad("std", ("model.init_std=0",), ("model.init_std must be positive, got 0.0",)),
    Bad("norm", ("model.norm_epsilon=nan",), ("model.norm_epsilon must be a finite number",)),
    Bad("prefetch", ("data.prefetch=-1",), ("data.prefetch must be at least 0, got -1",)),
    Bad("eod_sign", ("data.eod_token=-1",), ("data.eod_token must be at least 0, got -1",)),
    Bad("half", ("train.iterations=3.9",), ("train.iterations must have the type",)),
    Bad("true", ("train.iterations=true",), ("train.iterations must have the type", "True")),
    Bad("scale_true", ("optimizer.lr=true",), ("optimizer.lr must have the type", "True")),
    Bad("half_dump", ("train.dump_gradients=[1.5]",), ("dump_gradients", "1.5")),
    Bad("magi_nan", ("magi.max_imbalance=nan",), ("max_imbalance must be >= 1.0, got nan",)),
    Bad("magi_true", ("magi.costs.tile_q=true",), ("magi.costs.tile_q must have the type",)),
    Bad("magi_value", ("magi.max_imbalance=0.5",), ("max_imbalance must be >= 1.0, got 0.5",)),
]


@pytest.mark.parametrize(
    ("section", "values", "text"),
    [
        ("train", TrainConfig(iterations=3.9), "train.iterations must be a whole number, got 3.9"),  # type: ignore[arg-type]
        ("train", TrainConfig(seed=True), "train.seed must be a whole number, got True"),
        ("train", TrainConfig(dump_gradients=(1, 2.5)), "dump_gradients must be a whole number"),  # type: ignore[arg-type]
        ("data", DataConfig("x", prefetch=None), "data.prefetch must be a whole number, got None"),  # type: ignore[arg-type]
        ("optimizer", OptimizerConfig(lr="1e-3"), "optimizer.lr must be a finite number"),  # type: ignore[arg-type]
        ("optimizer", OptimizerConfig(lr=True), "optimizer.lr must be a finite number, got True"),
        ("log", LogConfig(csv=1), "log.csv must be true or false, got 1"),  # type: ignore[arg-type]
    ],
)
def test_a_config_made_without_a_file_is_held_to_its_types(
    section: str, values: object, text: str
) -> None:
    with pytest.raises(RecipeError, match=text):
        RunConfig(**{"data": DataConfig("somewhere"), section: values})  # type: ignore[arg-type]


def test_every_number_of_a_recipe_refuses_nan_and_infinity(tmp_path: Path) -> None:
    floats = [key for key, kind in _leaves(RunConfig) if kind is float]
    assert {"optimizer.lr", "model.init_std", "validation.fraction"} <= set(floats)
    for key in floats:
        for bad in ("nan", "inf", "-inf"):
            if (key, bad) != ("magi.max_imbalance", "inf"):  # no bound at all
                with pytest.raises(RecipeError, match=f"{key.split('.')[-1]} must be .*got {bad}"):
                    load(tmp_path, MINIMAL, f"{key}={bad}")


@pytest.mark.parametrize("bad", BAD, ids=lambda b: b.name)
def test_a_bad_value_is_one_clear_error(tmp_path: Path, bad: Bad) -> None:
    with pytest.raises(RecipeError) as error:
        load(tmp_path, MINIMAL, *bad.overrides)
    for text in bad.says:
        assert text in str(error.value)
    assert "\n" not in str(error.value)


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


def test_the_world_must_fit_the_layout(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "parallel.cp=2", "parallel.pp=2")
    assert data_parallel_size(config, 8) == 2
    with pytest.raises(RecipeError, match=r"a multiple of tp 1 \* pp 2 \* cp 2 = 4, got 6"):
        data_parallel_size(config, 6)
    fixed = load(tmp_path, MINIMAL, "parallel.cp=2", "parallel.dp=2")
    with pytest.raises(RecipeError, match=r"dp 2 = 4, got 2"):
        data_parallel_size(fixed, 2)


def test_the_batch_must_divide_over_replicas_and_stages(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "train.global_batch_size=6")
    with pytest.raises(RecipeError, match=r"data-parallel size 4, got 6; use 8"):
        data_parallel_size(config, 4)
    interleaved = load(
        tmp_path, MINIMAL, "parallel.pp=2", "parallel.vpp=2", "train.global_batch_size=3"
    )
    with pytest.raises(RecipeError, match=r"multiple of parallel.pp 2, got 3"):
        data_parallel_size(interleaved, 2)
