"""A run's config is checked when it is made, and knows its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import DataConfig, LogConfig, TrainConfig


def test_the_folder_of_a_run_has_its_name() -> None:
    run = RunConfig(name="a", data=DataConfig("x"), log=LogConfig(dir="out/runs"))
    assert run.folder == Path("out/runs/a")


def test_a_wrong_value_is_refused_also_in_a_changed_copy() -> None:
    with pytest.raises(RecipeError, match=r"data\.path must name packed data"):
        RunConfig()
    run = RunConfig(data=DataConfig("x"))
    with pytest.raises(RecipeError, match=r"train\.iterations must be positive, got 0"):
        replace(run, train=TrainConfig(iterations=0))
