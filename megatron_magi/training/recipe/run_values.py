"""All sections of a recipe together, before anything is checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_magi.config import MagiConfig
from megatron_magi.training.recipe.data_config import DataConfig
from megatron_magi.training.recipe.model_config import ModelConfig
from megatron_magi.training.recipe.output_config import CheckpointConfig, LogConfig
from megatron_magi.training.recipe.parallel_config import ParallelConfig
from megatron_magi.training.recipe.train_config import (
    OptimizerConfig,
    TrainConfig,
    ValidationConfig,
)


@dataclass(frozen=True)
class RunValues:
    """Everything of a run, as it was written; `RunConfig` is the same and checked."""

    name: str = "run"
    """Name of the folder that the run leaves behind, under log.dir."""
    attention: Literal["magi", "dense", "flex_plain", "sdpa"] = "magi"
    """"magi": this package. The others are baselines and need cp 1: "dense" is Megatron's own
    DotProductAttention with an explicit mask, "flex_plain" PyTorch's FlexAttention with a document
    mask, "sdpa" PyTorch's scaled_dot_product_attention for data.mask causal."""
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    magi: MagiConfig = field(default_factory=MagiConfig)
