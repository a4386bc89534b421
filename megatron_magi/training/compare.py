"""How far one run's losses and gradient norms are from a reference's, step by step."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_magi.training.config import RecipeError

Curve = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RunCurves:
    """What a run's steps.csv holds, one value per iteration."""

    name: str
    loss: Curve
    grad_norm: Curve
    step_seconds: Curve
    tokens_per_second: Curve


@dataclass(frozen=True)
class Gates:
    """When two fp32 runs count as the same training. Relative differences to the reference."""

    first_step: float = 2e-5
    """Loss and gradient norm of iteration 1: same weights, same batch, rounding alone."""
    any_step_loss: float = 1e-4
    """Loss of any iteration: rounding, grown by training (2e-6 seen in 60 steps on 2 cores)."""
    any_step_grad_norm: float = 1e-2
    """Gradient norm of any iteration (4e-5 seen)."""


@dataclass(frozen=True)
class Comparison:
    """A run beside its reference."""

    run: RunCurves
    loss_difference: Curve
    """|loss - reference| / reference, per iteration."""
    grad_norm_difference: Curve
    gates: Gates

    @property
    def first_step(self) -> float:
        """The larger of iteration 1's two differences."""
        return float(max(self.loss_difference[0], self.grad_norm_difference[0]))

    @property
    def passed(self) -> bool:
        """Within every gate; nan never is."""
        return (
            self.first_step <= self.gates.first_step
            and float(self.loss_difference.max()) <= self.gates.any_step_loss
            and float(self.grad_norm_difference.max()) <= self.gates.any_step_grad_norm
        )


def read_run(folder: Path) -> RunCurves:
    """The curves of a finished run.

    Raises:
        RecipeError: when the folder has no steps.csv with an iteration in it.
    """
    path = folder / "steps.csv"
    if not path.is_file():
        raise RecipeError(
            f"a run to compare must have a steps.csv, got none in {folder}; train it first"
        )
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise RecipeError(
            f"a run to compare must have an iteration, got none in {path}; see the run's log"
        )
    columns = ("lm_loss", "grad_norm", "step_seconds", "tokens_per_second")
    return RunCurves(folder.name, *(np.array([float(r[c]) for r in rows]) for c in columns))


def compare(run: RunCurves, reference: RunCurves, gates: Gates | None = None) -> Comparison:
    """Differences of two runs of equal length.

    Raises:
        RecipeError: when one has more iterations than the other.
    """
    if len(run.loss) != len(reference.loss):
        raise RecipeError(
            f"runs to compare must be equally long, got {len(run.loss)} iterations of {run.name} "
            f"and {len(reference.loss)} of {reference.name}; train them with one recipe"
        )
    return Comparison(
        run,
        np.abs(run.loss - reference.loss) / np.abs(reference.loss),
        np.abs(run.grad_norm - reference.grad_norm) / np.abs(reference.grad_norm),
        gates or Gates(),
    )


def did_train(run: RunCurves, drop: float = 0.5) -> bool:
    """The loss fell by `drop` nats or more: equal runs that learn nothing prove nothing."""
    return bool(run.loss[-5:].mean() < run.loss[0] - drop)
