"""How far one run's losses and gradient norms are from a baseline's, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from megatron_magi.compare.positions import Bucket
from megatron_magi.compare.run_error import RunError

Curve = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RunCurves:
    """Curves of a run, one value per iteration, and the job that made them."""

    name: str
    loss: Curve
    grad_norm: Curve
    step_seconds: Curve
    tokens_per_second: Curve
    """Rate of the whole job; nan where it is not known."""
    validation: dict[int, float] = field(default_factory=dict)
    """Validation loss by iteration, where it was measured."""
    by_position: dict[Bucket, float] = field(default_factory=dict)
    """Validation loss by position, where it was measured."""
    loss_tokens: float = 1.0
    """Tokens whose loss counts, in a usual step."""
    num_processes: int | None = None
    """Number of processes that trained it. None means that the run does not say."""
    first_iteration: int = 1
    """Above 1 if the run resumed from another run's checkpoint."""

    @property
    def median_tokens_per_second(self) -> float:
        """Without the first steps, which warm up: ten of a run of 20 or more, one of a shorter."""
        speeds = self.tokens_per_second
        warm_up = 10 if len(speeds) >= 20 else min(1, len(speeds) - 1)
        speeds = speeds[warm_up:][np.isfinite(speeds[warm_up:])]
        return float(np.median(speeds)) if len(speeds) else math.nan

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
    gradient: float = 1e-4
    """Error of any parameter's gradient, at the first iteration whose gradients were saved."""


@dataclass(frozen=True)
class Comparison:
    """A run compared with its baseline."""

    run: RunCurves
    loss_difference: Curve
    """|loss - baseline| / baseline, per iteration."""
    grad_norm_difference: Curve
    gates: Gates
    gradient: float | None = None
    """Largest relative L2 error of a parameter's gradient; None if none were saved."""

    @property
    def first_step(self) -> float:
        """The larger of iteration 1's two differences."""
        return float(max(self.loss_difference[0], self.grad_norm_difference[0]))

    @property
    def passed(self) -> bool:
        """True if every gate passes; nan never does."""
        return (
            self.first_step <= self.gates.first_step
            and float(self.loss_difference.max()) <= self.gates.any_step_loss
            and float(self.grad_norm_difference.max()) <= self.gates.any_step_grad_norm
            and (self.gradient is None or self.gradient <= self.gates.gradient)
        )


def common_steps(
    run: RunCurves, baseline: RunCurves, allow_shorter: bool = False
) -> tuple[RunCurves, RunCurves]:
    """Both runs, over the iterations that both have.

    Raises:
        RunError: they begin at different iterations; the run is longer than the baseline, or
            shorter where that is not allowed.
    """
    if run.first_iteration != baseline.first_iteration:
        raise RunError(
            f"runs to compare must begin at one iteration, got {run.first_iteration} of {run.name} "
            f"and {baseline.first_iteration} of {baseline.name}; resume both from one checkpoint"
        )
    ours, theirs = len(run.loss), len(baseline.loss)
    if ours > theirs or (ours < theirs and not allow_shorter):
        remedy = "" if ours > theirs else ", or allow a shorter run (--allow-shorter)"
        raise RunError(
            f"runs to compare must be equally long, got {ours} iterations of {run.name} "
            f"and {theirs} of {baseline.name}; train them for equally many steps{remedy}"
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
        RunError: one has more iterations than the other, see `common_steps`.
    """
    run, baseline = common_steps(run, baseline, allow_shorter)
    return Comparison(
        run,
        _relative(run.loss, baseline.loss),
        _relative(run.grad_norm, baseline.grad_norm),
        gates or Gates(),
    )


def _relative(curve: Curve, baseline: Curve) -> Curve:
    """Their difference over the baseline, 0 also where both are 0."""
    gap = np.abs(curve - baseline)
    without_a_ratio = np.where(gap == 0, 0.0, np.inf)
    return np.divide(gap, np.abs(baseline), out=without_a_ratio, where=baseline != 0)
