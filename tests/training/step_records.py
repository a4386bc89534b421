"""Made-up records of steps, and where a run writes them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from megatron_magi.compare.steps_file import StepRecord
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import DataConfig, LogConfig


def record(
    iteration: int,
    loss: float = 2.0,
    validation: float | None = None,
    mfu: float | None = None,
) -> StepRecord:
    return StepRecord(
        iteration=iteration,
        lm_loss=loss,
        grad_norm=1.0,
        learning_rate=1e-3,
        loss_tokens=10,
        consumed_samples=iteration * 8,
        step_seconds=0.5,
        tokens_per_second=100.0,
        tflops_per_rank=1.0,
        mfu=mfu,
        memory_gib=1.0,
        cp_imbalance=1.0,
        validation_loss=validation,
    )


def config(folder: Path, **log: Any) -> RunConfig:
    return RunConfig(
        data=DataConfig(path="x"), log=LogConfig(dir=str(folder), progress=False, **log)
    )


def rows(folder: Path) -> list[tuple[str, str]]:
    with (folder / "run" / "steps.csv").open(newline="") as file:
        return [(r["iteration"], r["lm_loss"]) for r in csv.DictReader(file)]
