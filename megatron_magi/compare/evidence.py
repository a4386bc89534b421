"""A run as evidence: its curves, gradient errors, and facts of its model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_magi.compare.differences import RunCurves
from megatron_magi.compare.gradient_errors import Baseline, GradientError, gradient_errors
from megatron_magi.compare.model_facts import ModelFacts
from megatron_magi.compare.read_run import read_run_and_facts


@dataclass(frozen=True)
class Evidence:
    """A run, and its gradients compared with the baseline's."""

    curves: RunCurves
    model: ModelFacts | None
    """None if the run does not say its arguments."""
    gradients: list[GradientError]

    def first(self, num_steps: int) -> Evidence:
        """The same run up to step ``num_steps``."""
        end = self.curves.first_iteration + num_steps
        known = [error for error in self.gradients if error.iteration < end]
        return replace(self, curves=self.curves.first(num_steps), gradients=known)

    @property
    def num_not_finite(self) -> int:
        """Number of recorded values that are inf or nan."""
        c = self.curves
        values = [*c.loss, *c.grad_norm, *c.validation.values(), *c.by_position.values()]
        values += [x for e in self.gradients for x in (e.norm, e.baseline_norm, e.relative_error)]
        return int(np.sum(~np.isfinite(np.array(values))))


def read_evidence(folder: Path, baseline: Baseline) -> Evidence:
    """Read a run's folder, and measure gradient errors if both runs saved gradients.

    Raises:
        RunError: no curves, a broken model.json, or gradients that do not fit.
    """
    errors = [] if baseline.runs == (folder,) else gradient_errors(folder, baseline)
    return Evidence(*read_run_and_facts(folder), errors)
