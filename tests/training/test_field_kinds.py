"""A number of a recipe is of its field's type, and finite."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from megatron_magi.training.recipe.config_checks import misfits
from megatron_magi.training.recipe.recipe import schema_of
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import (
    DataConfig,
    LogConfig,
    OptimizerConfig,
    TrainConfig,
)
from tests.training.small_recipes import MINIMAL, Bad, check_refused, load


@dataclass
class Section:
    whole: int = 1
    maybe: int | None = None
    share: float = 0.5
    flag: bool = True
    row: tuple[int, ...] = ()
    text: str = "x"
    choice: Literal["auto", "off"] = "off"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"whole": np.int64(3), "maybe": 3, "share": 3, "flag": False, "row": (1, np.int32(2))},
        {"share": np.float64(0.5), "row": [1, 2]},
        {"text": 3, "choice": 3},  # no numbers: other checks are theirs
    ],
    ids=["defaults", "of_numpy", "rows", "words"],
)
def test_values_of_their_kind_are_fine(fields: dict[str, Any]) -> None:
    assert list(misfits("a", Section(**fields))) == []


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("whole", 1.0, "a whole number"),
        ("whole", True, "a whole number"),
        ("whole", None, "a whole number"),
        ("maybe", 0.5, "a whole number"),
        ("share", "0.5", "a finite number"),
        ("share", float("nan"), "a finite number"),
        ("share", float("-inf"), "a finite number"),
        ("share", False, "a finite number"),
        ("flag", 1, "true or false"),
        ("row", (1, 2.5), "a whole number"),
        ("row", 2.5, "a whole number"),
    ],
)
def test_another_kind_is_named(name: str, value: Any, wanted: str) -> None:
    (said,) = misfits("a", Section(**{name: value}))
    assert said.startswith(f"a.{name} must be {wanted}, got ") and said.endswith(
        "; mend the recipe"
    )


def test_every_misfit_is_told() -> None:
    wrong: dict[str, Any] = {"whole": "x", "flag": "y", "row": (1.5, 2, None)}
    found = list(misfits("a", Section(**wrong)))
    assert [said.split()[0] for said in found] == ["a.whole", "a.flag", "a.row", "a.row"]


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
    floats = [key for key, kind in schema_of(RunConfig) if kind is float]
    assert {"optimizer.lr", "model.init_std", "validation.fraction"} <= set(floats)
    for key in floats:
        for bad in ("nan", "inf", "-inf"):
            with pytest.raises(RecipeError, match=f"{key.split('.')[-1]} must be .*got {bad}"):
                load(tmp_path, MINIMAL, f"{key}={bad}")


BAD = [
    Bad("lr_nan", ("optimizer.lr=nan",), ("optimizer.lr must be a finite number, got nan",)),
    Bad("lr_inf", ("optimizer.lr=inf",), ("optimizer.lr must be a finite number, got inf",)),
    Bad("min_lr_nan", ("optimizer.min_lr=nan",), ("optimizer.min_lr must be a finite", "got nan")),
    Bad("clip", ("optimizer.clip_grad=-inf",), ("optimizer.clip_grad must be a finite number",)),
    Bad("norm", ("model.norm_epsilon=nan",), ("model.norm_epsilon must be a finite number",)),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda b: b.name)
def test_a_number_of_a_file_that_is_not_finite_is_one_clear_error(tmp_path: Path, bad: Bad) -> None:
    check_refused(tmp_path, bad)
