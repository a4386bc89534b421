"""The baseline, its noise runs, and the thresholds for runs that are compared with them.

A single number of a noise run (the difference of two means, say) may be near 0 by chance, so a
scale is the larger of that number and of what its scatter gives. A scale is never below that of
one rounding step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_magi.compare.differences import Curve, RunCurves
from megatron_magi.compare.evidence import Evidence, read_evidence
from megatron_magi.compare.gradient_errors import Baseline, GradientError
from megatron_magi.compare.run_error import RunError

NUM_BLOCKS = 10
MIN_STEPS = 2 * NUM_BLOCKS
"""The least number of differences of which a standard error is computed."""
UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
"""Largest relative error of one rounding."""
TRUSTED_STEPS = 10
"""Two runs count as the same run if they have this many steps or more and all their losses are
equal."""


@dataclass(frozen=True)
class NoiseGates:
    """Thresholds of a comparison with a noise run."""

    step_1_loss: float = 1e-4
    """Relative loss difference of iteration 1: the same weights and samples."""
    gradient_ratio: float = 3.0
    """Relative L2 error of every parameter's gradient, in units of the noise run's."""
    gradient_floor: float | None = None
    """The least noise of a gradient. None: one rounding step, see `noise_floor.py`."""
    mean_loss: float = 0.0025
    """Mean of |relative loss difference| over the run."""
    noise_ratio: float = 2.0
    """Means and validation, in units of the noise run's scale."""
    last_steps: int = 50
    """Number of last steps whose mean loss is compared."""
    every_validation: bool = False
    """True if every validation is judged. False: the last one."""
    loss_start: float = 0.3
    """Nats between the first loss and an untrained model's."""
    loss_drop: float = 5.0
    """Nats by which the loss falls."""


@dataclass(frozen=True)
class NoiseFloor:
    """The baseline and its noise runs, and the thresholds measured with them."""

    baseline: Evidence
    noises: tuple[Evidence, ...]
    """One or more runs. Those shorter than the longest only measure gradients."""
    gates: NoiseGates

    @property
    def noise_curves(self) -> list[RunCurves]:
        """Curves of the noise runs that are as long as the longest."""
        longest = max(len(n.curves.loss) for n in self.noises)
        return [n.curves for n in self.noises if len(n.curves.loss) == longest]

    @property
    def noise_gradients(self) -> list[GradientError]:
        """For every gradient, the largest error of any noise run."""
        found: dict[tuple[int, str], GradientError] = {}
        for error in (e for noise in self.noises for e in noise.gradients):
            key = (error.iteration, error.parameter)
            if key not in found or error.relative_error > found[key].relative_error:
                found[key] = error
        return list(found.values())

    @property
    def dtype(self) -> str:
        """Dtype of the baseline; the stricter one if it is not known."""
        return self.baseline.model.dtype if self.baseline.model else "fp32"

    @property
    def gradient_floor(self) -> float:
        """Smallest noise of a gradient that counts."""
        given, tokens = self.gates.gradient_floor, self.baseline.curves.loss_tokens
        return gradient_floor(self.dtype, tokens) if given is None else given

    @property
    def loss_floor(self) -> float:
        """Smallest relative noise of a loss that counts."""
        return loss_floor(self.dtype, self.baseline.curves.loss_tokens)


def read_noise_floor(baseline: Path, noises: Sequence[Path], gates: NoiseGates) -> NoiseFloor:
    """Read the runs that others are compared with.

    Raises:
        RunError: a folder that is not a run, inf or nan in it, or a noise run without noise.
    """
    one = Baseline((baseline,))
    found = tuple(read_evidence(noise, one) for noise in noises)
    floor = NoiseFloor(read_evidence(baseline, one), found, gates)
    for evidence in (floor.baseline, *floor.noises):
        role = "baseline" if evidence is floor.baseline else "noise run"
        if evidence.num_not_finite:
            raise RunError(
                f"the {role} must be finite, got {evidence.num_not_finite} values that are inf or "
                f"nan in {evidence.curves.name}; train it again"
            )
    for folder, noise in zip(noises, floor.noises, strict=True):
        require_noise(folder, noise, baseline, floor.baseline)
    return floor


def require_noise(folder: Path, noise: Evidence, baseline: Path, other_run: Evidence) -> None:
    """Raise RunError for a noise run that is the run it is compared with."""
    one, other = other_run.curves.loss, noise.curves.loss
    steps = min(len(one), len(other))
    if folder.resolve() == baseline.resolve() or (
        steps >= TRUSTED_STEPS and bool((one[:steps] == other[:steps]).all())
    ):
        raise RunError(
            f"runs that measure noise must differ by rounding, got equal losses in {baseline} and "
            f"{folder}; train one with another kernel of the same precision, or with a step's "
            f"samples in another order"
        )


def standard_error(differences: Curve) -> float:
    """Standard error of the mean, from the means of ten equal blocks, as neighbours are alike.

    Blocks are assumed to be independent, so differences that are alike for longer than a block make
    it too small. It is 0 for fewer than 20 differences.
    """
    if len(differences) < MIN_STEPS:
        return 0.0
    length = len(differences) // NUM_BLOCKS
    means = differences[-length * NUM_BLOCKS :].reshape(NUM_BLOCKS, length).mean(axis=1)
    return float(means.std(ddof=1) / math.sqrt(NUM_BLOCKS))


def mean_scale(differences: Curve) -> float:
    """Noise scale of a mean: its absolute value, or its standard error if that is larger."""
    return max(abs(float(differences.mean())), standard_error(differences))


def mean_scale_of_runs(differences: Curve) -> float:
    """Root mean square of the scales of several noise runs, [num_noise_runs, iterations]."""
    return root_mean_square(np.array([mean_scale(row) for row in differences]))


def root_mean_square(differences: Curve) -> float:
    """Scale of differences around 0, of which each may be small by chance."""
    return float(np.sqrt(np.mean(np.square(differences))))


def gradient_floor(dtype: str, loss_tokens: float) -> float:
    """The least relative L2 error that noise of a gradient can have.

    It is one rounding step of `dtype`, or of a single-precision sum over a step's tokens. Rounding
    a gradient once makes that error, in any order of the sums.
    """
    return max(UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["fp32"] * math.sqrt(loss_tokens))


def loss_floor(dtype: str, loss_tokens: float) -> float:
    """The same for a loss, a mean of independent tokens' losses, each rounded once."""
    return max(UNIT_ROUNDOFF[dtype] / math.sqrt(loss_tokens), 2.0**-23)
