"""A training run as one frozen value; a recipe is this value written as YAML.

Values are checked here once, before any process starts; `recipe.py` reads files and overrides.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_magi.training.recipe.config_checks import check_run
from megatron_magi.training.recipe.data_config import DataConfig
from megatron_magi.training.recipe.model_config import ModelConfig
from megatron_magi.training.recipe.output_config import CheckpointConfig, LogConfig
from megatron_magi.training.recipe.parallel_config import ParallelConfig
from megatron_magi.training.recipe.run_values import RunValues
from megatron_magi.training.recipe.train_config import (
    OptimizerConfig,
    TrainConfig,
    ValidationConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainConfig",
    "ValidationConfig",
]


@dataclass(frozen=True)
class RunConfig(RunValues):
    """All values of a run, checked when the object is made."""

    @property
    def folder(self) -> Path:
        """The folder that holds the output of the run."""
        return Path(self.log.dir) / self.name

    def __post_init__(self) -> None:
        check_run(self)
