"""Estimates the effect of rounding from runs that differ by rounding alone.

A single number of the noise run (the difference of two means, say) may be near 0 by chance, so a
scale is the larger of that number and of what its scatter gives. A scale is never below that of
one rounding step.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_magi.training.parity.differences import Curve

NUM_BLOCKS = 10
MIN_STEPS = 2 * NUM_BLOCKS
"""The least number of differences of which a standard error is computed."""
UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp32": 2.0**-24}
"""Largest relative error of one rounding."""


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
