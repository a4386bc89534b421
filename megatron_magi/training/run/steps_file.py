"""The steps.csv of a run: a line for each iteration. Needs no torch and no Megatron."""

from __future__ import annotations

import csv
from pathlib import Path

from megatron_magi.training.recipe.recipe_error import RecipeError

STEPS = "steps.csv"


def read_steps(path: Path) -> list[dict[str, str]]:
    """Lines of a steps.csv; none if there is no such file.

    Raises:
        RecipeError: the file is not text, or cannot be split into columns.
    """
    if not path.is_file():
        return []
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise RecipeError(
            f"a steps.csv must be text with a line for each iteration, got {error} in {path}; "
            f"restore or remove it"
        ) from error


def steps_until(path: Path, iteration: int) -> list[dict[str, str]]:
    """Lines of the iterations up to this one, without a line that a kill or a full disk cut off."""
    return [
        row
        for row in read_steps(path)
        if None not in row.values()
        and row.get("iteration", "").isdecimal()
        and int(row["iteration"]) <= iteration
    ]
