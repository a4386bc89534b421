"""Fused parts refuse a second derivative: their gradients come from kernels without a graph."""

import pytest
import torch

from tests.adapter.interpreter import DEVICE  # isort: skip

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused.norm import AddAndNormalize, rms_norm
from megatron_magi.adapter.fused.qkv_rope import split_and_rotate
from megatron_magi.adapter.fused.swiglu import swiglu


def add_and_normalize(x):
    weight = torch.ones(24, device=DEVICE)
    return AddAndNormalize.apply(x, x.cos(), weight, 1e-5, False)[1]


PARTS = {
    "norm": lambda x: rms_norm(x, torch.ones(24, device=DEVICE), 1e-5),
    "addition": add_and_normalize,
    "qkv": lambda x: split_and_rotate(x, torch.ones(3, 1, 1, 8, device=DEVICE), 1, 8)[0],
    "swiglu": swiglu,
}


@pytest.mark.parametrize("part", PARTS)
def test_a_second_derivative_is_refused(part):
    """Beside other terms it would be left out of the sum without an error."""
    x = torch.randn(3, 1, 24, device=DEVICE, requires_grad=True)
    (grad,) = torch.autograd.grad(PARTS[part](x * 1).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(grad.square().sum() + x.square().sum(), x)
