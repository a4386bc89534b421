"""Finds the gradient with the largest error, in units of its noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_magi.training.parity.gradient_errors import GradientError
from megatron_magi.training.recipe.recipe_error import RecipeError


def worst_gradient(
    errors: Sequence[GradientError], noise: Sequence[GradientError], floor: float
) -> tuple[float, str] | None:
    """(largest relative error over noise, what it was); None if no iteration is in both.

    The noise of a parameter is the noise run's error of it in that iteration, or `floor` if that is
    larger. Before the first update, samples in another order change only the last bits of a
    gradient's single-precision sums, far less than rounding activations once does.

    Raises:
        RecipeError: a parameter that the noise run does not have.
    """
    noise_of = {(e.iteration, e.parameter): e.relative_error for e in noise}
    iterations = {i for i, _ in noise_of}
    shared = [e for e in errors if e.iteration in iterations]
    if not shared:
        return None
    missing = {(e.iteration, e.parameter) for e in shared} ^ {
        k for k in noise_of if k[0] in {e.iteration for e in shared}
    }
    if missing:
        raise RecipeError(
            f"the run and the noise run must have the same parameters, got only one with "
            f"{sorted(missing)[0][1]}; dump both with one recipe"
        )
    ratios = [e.relative_error / max(noise_of[e.iteration, e.parameter], floor) for e in shared]
    at = max(range(len(ratios)), key=lambda i: math.inf if math.isnan(ratios[i]) else ratios[i])
    worst, measured = shared[at], noise_of[shared[at].iteration, shared[at].parameter]
    text = (
        f"{worst.parameter} at step {worst.iteration}: error {worst.relative_error:.1e}, noise "
        f"{measured:.1e}{f', counted as {floor:.1e}' if floor > measured else ''}; worst of "
        f"{len(shared)} gradients of steps {sorted({e.iteration for e in shared})}"
    )
    return ratios[at], text
