"""A training run as one frozen value; a recipe is this value written as YAML.

Values are checked here once, before any process starts; `recipe.py` reads files and overrides.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_magi.training.recipe.config_checks import check_run
from megatron_magi.training.recipe.run_values import RunValues


@dataclass(frozen=True)
class RunConfig(RunValues):
    """All values of a run, checked when the object is made."""

    @property
    def folder(self) -> Path:
        """The folder that holds the output of the run."""
        return Path(self.log.dir) / self.name

    def __post_init__(self) -> None:
        check_run(self)
