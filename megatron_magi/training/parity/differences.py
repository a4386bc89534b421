"""How far one run's losses and gradient norms are from a baseline's, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_magi.training.parity.positions import Bucket, read_positions
from megatron_magi.training.parity.tensorboard_run import (
    LOSS,
    NORM,
    TIME,
    VALIDATION,
    has_events,
    read_series,
)
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.run.steps_file import STEPS, read_steps

Curve = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RunCurves:
    """Curves of a run, one value per iteration; nan where the run did not record it."""

    name: str
    loss: Curve
    grad_norm: Curve
    step_seconds: Curve
    tokens_per_second: Curve
    validation: dict[int, float] = field(default_factory=dict)
    """Validation loss by iteration, where it was measured."""
    by_position: dict[Bucket, float] = field(default_factory=dict)
    """Validation loss by position, where it was measured."""
    loss_tokens: float = 1.0
    """Tokens whose loss counts, in a usual step."""
    num_processes: int | None = None
    """Number of processes that trained it. None: steps.csv does not say."""
    first_iteration: int = 1
    """Above 1 if the run resumed from another run's checkpoint."""

    @property
    def median_tokens_per_second(self) -> float:
        """Without the first steps, which warm up: ten of a run of 20 or more, one of a shorter."""
        speeds = self.tokens_per_second
        warm_up = 10 if len(speeds) >= 20 else min(1, len(speeds) - 1)
        return float(np.median(speeds[warm_up:]))

    def first(self, num_steps: int) -> RunCurves:
        """The same run up to step `num_steps`."""
        curves = ("loss", "grad_norm", "step_seconds", "tokens_per_second")
        cut = {name: getattr(self, name)[:num_steps] for name in curves}
        end = self.first_iteration + num_steps
        validation = {i: loss for i, loss in self.validation.items() if i < end}
        by_position = {b: loss for b, loss in self.by_position.items() if b.iteration < end}
        return replace(self, **cut, validation=validation, by_position=by_position)


@dataclass(frozen=True)
class Gates:
    """Limits of the relative differences between an fp32 run and its baseline."""

    first_step: float = 2e-5
    """Loss and gradient norm of iteration 1: same weights, same batch, only rounding differs."""
    any_step_loss: float = 1e-4
    """Loss of any iteration: rounding, amplified by training (2e-6 in 60 steps on 2 cores)."""
    any_step_grad_norm: float = 1e-2
    """Gradient norm of any iteration (4e-5 seen)."""


@dataclass(frozen=True)
class Comparison:
    """A run beside its baseline."""

    run: RunCurves
    loss_difference: Curve
    """|loss - baseline| / baseline, per iteration."""
    grad_norm_difference: Curve
    gates: Gates

    @property
    def first_step(self) -> float:
        """The larger of iteration 1's two differences."""
        return float(max(self.loss_difference[0], self.grad_norm_difference[0]))

    @property
    def passed(self) -> bool:
        """Whether every gate passes; nan never does."""
        return (
            self.first_step <= self.gates.first_step
            and float(self.loss_difference.max()) <= self.gates.any_step_loss
            and float(self.grad_norm_difference.max()) <= self.gates.any_step_grad_norm
        )


def read_run(folder: Path) -> RunCurves:
    """Returns the curves of a run: of its steps.csv, or of Megatron's TensorBoard files.

    Raises:
        RecipeError: the folder has neither, or a broken one.
    """
    path = folder / STEPS
    if not path.is_file() and has_events(folder):
        return _of_megatron(folder)
    if not path.is_file():
        raise RecipeError(
            f"a run to compare must have a steps.csv, or the files of Megatron's "
            f"--tensorboard-dir, got none in {folder}; train it first"
        )
    rows = read_steps(path)
    if not rows:
        raise RecipeError(
            f"a run to compare must have an iteration, got none in {path}; see the run's log"
        )
    try:
        run = replace(_curves(folder.name, rows), by_position=read_positions(folder))
        iterations = [int(r["iteration"]) for r in rows]
    except (
        KeyError,
        TypeError,
        ValueError,
    ) as error:  # no such column, a cut line or no number
        raise RecipeError(
            f"a steps.csv must have the columns and numbers that training writes, got {error!r} "
            f"in {path}; train it again"
        ) from None
    if iterations != list(range(iterations[0], iterations[0] + len(rows))):
        raise RecipeError(
            f"a run to compare must have its iterations one after the other, got gaps in {path}; "
            f"train it again"
        )
    return run


def _of_megatron(folder: Path) -> RunCurves:
    series = read_series(folder)
    steps = sorted(series[LOSS])
    loss, norm, seconds = (
        np.array([series[tag].get(i, float("nan")) for i in steps]) for tag in (LOSS, NORM, TIME)
    )
    unknown = np.full(len(steps), float("nan"))
    return RunCurves(
        name=folder.name,
        loss=loss,
        grad_norm=norm,
        step_seconds=seconds,
        tokens_per_second=unknown,
        validation=series[VALIDATION],
        first_iteration=steps[0],
    )


def _curves(name: str, rows: list[dict[str, str]]) -> RunCurves:
    validated = [r for r in rows if r.get("validation_loss")]
    return RunCurves(
        name=name,
        loss=_column(rows, "lm_loss"),
        grad_norm=_column(rows, "grad_norm"),
        step_seconds=_column(rows, "step_seconds"),
        tokens_per_second=_column(rows, "tokens_per_second"),
        validation={int(r["iteration"]): float(r["validation_loss"]) for r in validated},
        loss_tokens=max(1.0, float(np.median([float(r.get("loss_tokens") or 1) for r in rows]))),
        num_processes=int(rows[-1].get("num_processes") or 0) or None,
        first_iteration=int(rows[0]["iteration"]),
    )


def _column(rows: list[dict[str, str]], name: str) -> Curve:
    return np.array([float(row[name]) for row in rows])


def common_steps(
    run: RunCurves, baseline: RunCurves, allow_shorter: bool = False
) -> tuple[RunCurves, RunCurves]:
    """Both runs, over the iterations that both have.

    Raises:
        RecipeError: they begin at different iterations; the run is longer than the baseline, or
            shorter where that is not allowed.
    """
    if run.first_iteration != baseline.first_iteration:
        raise RecipeError(
            f"runs to compare must begin at one iteration, got {run.first_iteration} of {run.name} "
            f"and {baseline.first_iteration} of {baseline.name}; resume both from one checkpoint"
        )
    ours, theirs = len(run.loss), len(baseline.loss)
    if ours > theirs or (ours < theirs and not allow_shorter):
        remedy = "" if ours > theirs else ", or allow a shorter run (--allow-shorter)"
        raise RecipeError(
            f"runs to compare must be equally long, got {ours} iterations of {run.name} "
            f"and {theirs} of {baseline.name}; train them with one recipe{remedy}"
        )
    return run, baseline.first(ours)


def compare(
    run: RunCurves,
    baseline: RunCurves,
    gates: Gates | None = None,
    allow_shorter: bool = False,
) -> Comparison:
    """Differences of two runs, over the steps of the first.

    Raises:
        RecipeError: one has more iterations than the other, see `common_steps`.
    """
    run, baseline = common_steps(run, baseline, allow_shorter)
    return Comparison(
        run,
        np.abs(run.loss - baseline.loss) / np.abs(baseline.loss),
        np.abs(run.grad_norm - baseline.grad_norm) / np.abs(baseline.grad_norm),
        gates or Gates(),
    )
