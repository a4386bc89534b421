"""Keeps a run from the start from replacing another run's numbers, unless it is told to."""

from __future__ import annotations

from megatron_magi.compare.steps_file import STEPS, read_steps
from megatron_magi.training.checkpoint.checkpoint_folder import choose_checkpoint
from megatron_magi.training.recipe.recipe import to_yaml
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig


def check_overwrite(config: RunConfig) -> None:
    """Check that this start does not replace the steps.csv of another run.

    A resumed run continues its file. So does a job that its scheduler starts again before it has
    saved: checkpoint.load is "auto", and the recipe beside the file is the same.

    Raises:
        RecipeError: it would, or checkpoint.load names something and there is nothing to load.
    """
    resumed = choose_checkpoint(config).checkpoint is not None
    if resumed or config.log.overwrite or not config.log.csv:
        return
    path = config.folder / STEPS
    done, recipe = len(read_steps(path)), config.folder / "recipe.yaml"
    is_same = recipe.is_file() and recipe.read_text() == to_yaml(config)
    if not done or (config.checkpoint.load == "auto" and is_same):
        return
    raise RecipeError(
        f"a run from the start needs a name of its own, got {config.name!r} with {done:,} "
        f"iterations in {path}; set another name=, log.overwrite=true to replace them, or "
        f"checkpoint.load=auto to go on from a checkpoint"
    )
