"""A recipe of one key, with overrides, and values in it that are refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_magi.training.recipe.recipe import load_recipe
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig

MINIMAL = "data: {path: somewhere}\n"


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load_recipe(path, overrides)


@dataclass(frozen=True)
class Bad:
    name: str
    overrides: tuple[str, ...]
    says: tuple[str, ...]


def check_refused(tmp_path: Path, bad: Bad) -> None:
    """Assert that the overrides are one error of one line that says what it must."""
    with pytest.raises(RecipeError) as error:
        load(tmp_path, MINIMAL, *bad.overrides)
    for text in bad.says:
        assert text in str(error.value)
    assert "\n" not in str(error.value)
