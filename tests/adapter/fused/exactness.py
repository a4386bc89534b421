"""How exact a fused part must be: fp64, and the error of the plain path in the same dtype."""

import pytest
import torch

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Half a unit of the last place."""
EXP = 2.0**-20
"""Relative error of the hardware's exponential (its argument's rounding included), square root and
division; torch's are exacter."""
DTYPES = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


def worst(got, exact):
    return float((got.double() - exact).abs().max())
