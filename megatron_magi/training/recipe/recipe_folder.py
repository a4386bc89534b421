"""Recipes that come with the package, by name."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from megatron_magi.training.recipe.recipe_error import RecipeError

PACKAGE = Path(__file__).parents[2]


def find_recipe(wanted: str | Path) -> Path:
    """The file that `wanted` means: a path as it is, a bare name one of the packaged recipes.

    Raises:
        RecipeError: an unknown name (with the nearest known one), or a path without a file.
    """
    path = Path(wanted)
    if path.is_file():
        return path
    packaged = packaged_recipes()
    if str(wanted) in packaged:
        return packaged[str(wanted)]
    near = [name for name in packaged if name.startswith(path.stem)]
    near += get_close_matches(path.stem, packaged, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RecipeError(
        f"the recipe must be a YAML file or the name of a packaged one, got {wanted}, which is "
        f"neither; {hint}known: {', '.join(packaged)}"
    )


def packaged_recipes() -> dict[str, Path]:
    """Paths by name, sorted.

    A wheel has them inside the package (setup.py copies them); a checkout beside it.
    """
    folders = (PACKAGE / "recipes", PACKAGE.parent / "recipes")
    folder = next((f for f in folders if f.is_dir()), folders[0])
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
