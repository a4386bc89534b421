"""The reference, its noise run, and the thresholds that runs are held to with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_magi.training import noise_scale
from megatron_magi.training.config import RecipeError
from megatron_magi.training.evidence import Evidence, read_evidence

TRUSTED_STEPS = 10
"""From here on two runs whose losses are all equal are one run, or differ in nothing."""


@dataclass(frozen=True)
class NoiseGates:
    """Thresholds of a comparison with a noise run."""

    step_1_loss: float = 1e-4
    """Relative loss difference of iteration 1: the same weights and samples."""
    gradient_ratio: float = 3.0
    """Relative L2 error of every parameter's gradient, in units of the noise run's."""
    gradient_floor: float | None = None
    """Noise of a gradient is at least this. None: one rounding step, `noise_scale.py`."""
    mean_loss: float = 0.0025
    """Mean of |relative loss difference| over the run."""
    noise_ratio: float = 2.0
    """Means and validation, in units of the noise run's scale."""
    last_steps: int = 50
    """Steps at the end whose mean loss is compared."""
    loss_start: float = 0.3
    """Nats between the first loss and ln(vocabulary)."""
    loss_drop: float = 5.0
    """Nats by which the loss falls."""


@dataclass(frozen=True)
class NoiseFloor:
    """The reference and the noise run, and the thresholds measured with them."""

    reference: Evidence
    noise: Evidence
    gates: NoiseGates

    @property
    def dtype(self) -> str:
        """Of the reference; the stricter one where its recipe is missing."""
        return self.reference.recipe.dtype if self.reference.recipe else "fp32"

    @property
    def gradient_floor(self) -> float:
        """Smallest noise of a gradient that counts."""
        given, tokens = self.gates.gradient_floor, self.reference.curves.loss_tokens
        return noise_scale.gradient_floor(self.dtype, tokens) if given is None else given

    @property
    def loss_floor(self) -> float:
        """Smallest relative noise of a loss that counts."""
        return noise_scale.loss_floor(self.dtype, self.reference.curves.loss_tokens)


def read_noise_floor(reference: Path, noise: Path, gates: NoiseGates) -> NoiseFloor:
    """What runs are judged with.

    Raises:
        RecipeError: a folder that is no run, inf or nan in it, or a noise run without noise.
    """
    floor = NoiseFloor(read_evidence(reference, reference), read_evidence(noise, reference), gates)
    for evidence, role in ((floor.reference, "reference"), (floor.noise, "noise run")):
        if evidence.num_not_finite:
            raise RecipeError(
                f"the {role} must be finite, got {evidence.num_not_finite} values that are inf or "
                f"nan in {evidence.curves.name}; train it again"
            )
    one, other = floor.reference.curves.loss, floor.noise.curves.loss
    steps = min(len(one), len(other))
    if noise.resolve() == reference.resolve() or (
        steps >= TRUSTED_STEPS and bool((one[:steps] == other[:steps]).all())
    ):
        raise RecipeError(
            f"the noise run must differ from the reference by rounding, got equal losses in "
            f"{reference} and {noise}; train it with data.step_order=reversed and several samples "
            f"a step"
        )
    return floor
