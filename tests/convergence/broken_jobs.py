"""What tests/adapter/layout_worker.py runs for the negative controls."""

from __future__ import annotations

from typing import Any

from tests.convergence.broken_train import ERRORS
from tests.training import training_jobs


def train_broken(recipe: dict[str, Any], error: str | None) -> Any:
    """`training_jobs.train` with an error of `broken_train`, or none."""
    if error is not None:
        ERRORS[error]()
    return training_jobs.train(recipe)
