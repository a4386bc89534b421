"""The baseline, its noise runs, and the thresholds for runs that are compared with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_magi.training.parity import noise_scale
from megatron_magi.training.parity.baseline import Baseline
from megatron_magi.training.parity.differences import RunCurves
from megatron_magi.training.parity.evidence import Evidence, read_evidence
from megatron_magi.training.parity.gradient_errors import GradientError
from megatron_magi.training.recipe.recipe_error import RecipeError

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
    """The least noise of a gradient. None: one rounding step, see `noise_scale.py`."""
    mean_loss: float = 0.0025
    """Mean of |relative loss difference| over the run."""
    noise_ratio: float = 2.0
    """Means and validation, in units of the noise run's scale."""
    last_steps: int = 50
    """Number of last steps whose mean loss is compared."""
    every_validation: bool = False
    """Whether every validation is judged. False: the last one."""
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
        """Dtype of the baseline; the stricter one if its recipe is missing."""
        return self.baseline.recipe.dtype if self.baseline.recipe else "fp32"

    @property
    def gradient_floor(self) -> float:
        """Smallest noise of a gradient that counts."""
        given, tokens = self.gates.gradient_floor, self.baseline.curves.loss_tokens
        return noise_scale.gradient_floor(self.dtype, tokens) if given is None else given

    @property
    def loss_floor(self) -> float:
        """Smallest relative noise of a loss that counts."""
        return noise_scale.loss_floor(self.dtype, self.baseline.curves.loss_tokens)


def read_noise_floor(baseline: Path, noises: Sequence[Path], gates: NoiseGates) -> NoiseFloor:
    """Read the runs that others are compared with.

    Raises:
        RecipeError: a folder that is not a run, inf or nan in it, or a noise run without noise.
    """
    one = Baseline((baseline,))
    found = tuple(read_evidence(noise, one) for noise in noises)
    floor = NoiseFloor(read_evidence(baseline, one), found, gates)
    for evidence in (floor.baseline, *floor.noises):
        role = "baseline" if evidence is floor.baseline else "noise run"
        if evidence.num_not_finite:
            raise RecipeError(
                f"the {role} must be finite, got {evidence.num_not_finite} values that are inf or "
                f"nan in {evidence.curves.name}; train it again"
            )
    for folder, noise in zip(noises, floor.noises, strict=True):
        require_noise(folder, noise, baseline, floor.baseline)
    return floor


def require_noise(folder: Path, noise: Evidence, baseline: Path, other_run: Evidence) -> None:
    """Raise RecipeError for a noise run that is the run it is compared with."""
    one, other = other_run.curves.loss, noise.curves.loss
    steps = min(len(one), len(other))
    if folder.resolve() == baseline.resolve() or (
        steps >= TRUSTED_STEPS and bool((one[:steps] == other[:steps]).all())
    ):
        raise RecipeError(
            f"runs that measure noise must differ by rounding, got equal losses in {baseline} and "
            f"{folder}; train one with data.step_order=reversed and several samples a step"
        )
