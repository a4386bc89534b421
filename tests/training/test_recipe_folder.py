"""Recipes by name: a path first, then those of the package, or the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_magi.training.recipe.recipe import find_recipe, load_recipe, packaged_recipes
from megatron_magi.training.recipe.recipe_error import RecipeError

ROOT = Path(__file__).parents[2]


def test_a_name_is_looked_up_and_a_path_is_taken_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("tiny_llama_cpu") == ROOT / "recipes" / "own_trainer" / "tiny_llama_cpu.yaml"
    Path("tiny_llama_cpu").write_text("name: mine\ndata: {path: x}\n")
    assert load_recipe("tiny_llama_cpu").name == "mine"


def test_an_installed_package_has_its_own_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder named recipes beside an installed package is somebody else's."""
    for folder, name in (("package/recipes/own_trainer", "inside"), ("recipes", "beside")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{name}.yaml").touch()
    monkeypatch.setattr("megatron_magi.training.recipe.recipe.PACKAGE", tmp_path / "package")
    assert list(packaged_recipes()) == ["inside"]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("llama3_1b_2gpu", "did you mean llama3_1b_2gpu_cp2? known: llama3_180m_1gpu, "),
        ("recipes/own_trainer/llama3_1b_4gpu.yaml", "did you mean llama3_1b_4gpu_cp4?"),
        ("zzz", "which is neither; known: llama3_180m_1gpu, "),
    ],
    ids=["name", "path", "hopeless"],
)
def test_an_unknown_name_lists_what_there_is(wanted: str, says: str) -> None:
    with pytest.raises(RecipeError, match=f"got {wanted}, which is neither") as error:
        find_recipe(wanted)
    assert says in str(error.value)
