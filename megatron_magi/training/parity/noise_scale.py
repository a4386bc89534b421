"""How large a difference rounding alone makes, from runs that differ by rounding alone.

A single number of the noise run (the difference of two means, say) may be near 0 by chance, so a
scale is the larger of that number and of what its scatter says; below the scale of one rounding
step no measured scale counts.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_magi.training.parity.compare import Curve

NUM_BLOCKS = 10
MIN_STEPS = 2 * NUM_BLOCKS
"""Fewer differences have no standard error here."""
UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp32": 2.0**-24}
"""Largest relative error of rounding once."""


def standard_error(differences: Curve) -> float:
    """Of their mean, from the means of ten equal blocks, since neighbouring steps are alike.

    Independent blocks are assumed; differences that stay alike for longer than a block make it too
    small. 0 for fewer than 20 differences.
    """
    if len(differences) < MIN_STEPS:
        return 0.0
    length = len(differences) // NUM_BLOCKS
    means = differences[-length * NUM_BLOCKS :].reshape(NUM_BLOCKS, length).mean(axis=1)
    return float(means.std(ddof=1) / math.sqrt(NUM_BLOCKS))


def mean_scale(differences: Curve) -> float:
    """Scale of the noise of a mean: its own value here, or its standard error if that is larger."""
    return max(abs(float(differences.mean())), standard_error(differences))


def mean_scale_of_runs(differences: Curve) -> float:
    """Of several noise runs, [number of them, iterations]: root mean square of their scales."""
    return root_mean_square(np.array([mean_scale(row) for row in differences]))


def root_mean_square(differences: Curve) -> float:
    """Scale of differences around 0, of which each may be small by chance."""
    return float(np.sqrt(np.mean(np.square(differences))))


def gradient_floor(dtype: str, loss_tokens: float) -> float:
    """Relative L2 error below which noise is not believed to be.

    One rounding step of `dtype`, or of a single-precision sum over a step's tokens: rounding a
    gradient once already costs that, however the sums were ordered.
    """
    return max(UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["fp32"] * math.sqrt(loss_tokens))


def loss_floor(dtype: str, loss_tokens: float) -> float:
    """The same of a loss: a mean of independent tokens' losses, each rounded once."""
    return max(UNIT_ROUNDOFF[dtype] / math.sqrt(loss_tokens), 2.0**-23)
