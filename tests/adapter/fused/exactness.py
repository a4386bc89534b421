"""How exact a fused part must be: fp64, and the error of the plain path in the same dtype."""

import pytest
import torch

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Half a unit of the last place."""
CUT_OFF = 1 if torch.cuda.is_available() else 2
"""Triton's interpreter cuts bf16 off instead of rounding it; a unit of the last place, not half."""
EXP = 2.0**-20
"""Relative error of the hardware's exponential (its argument's rounding included), square root and
division; torch's are exacter."""
DTYPES = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


def worst(got, exact):
    return float((got.double() - exact).abs().max())


def results(function, *inputs, grad):
    """Output and gradients of all inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def assert_as_good(fused, plain, exact, dtype):
    step = ROUNDING[dtype] * (CUT_OFF if dtype == torch.bfloat16 else 1)
    for got, same, want in zip(fused, plain, exact, strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        error, bound = ((x.double() - want).abs().max() for x in (got, same))
        assert error <= 1.5 * bound + max(step, EXP) * want.abs().max()
