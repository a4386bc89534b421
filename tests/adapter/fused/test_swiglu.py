"""The fused SwiGLU against fp64, bounded by PyTorch's error. Interpreted on the CPU."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.adapter.interpreter import DEVICE  # isort: skip

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused.swiglu import SwiGLU, check_fits, swiglu
from tests.adapter.fused.exactness import DTYPES, assert_as_good, results


def gated(mixed):
    gate, up = mixed.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@DTYPES
@pytest.mark.parametrize("shape", [(5, 2, 6), (3, 1, 2 * 1024), (2, 2, 2 * 1300), (0, 1, 8)])
def test_swiglu_and_its_gradient(dtype, shape):
    torch.manual_seed(shape[-1])
    mixed = (4 * torch.randn(shape, device=DEVICE)).to(dtype)
    grad = torch.randn(*shape[:-1], shape[-1] // 2, device=DEVICE).to(dtype)
    exact = results(gated, mixed.double(), grad=grad)
    if mixed.numel():
        assert_as_good(
            results(swiglu, mixed, grad=grad), results(gated, mixed, grad=grad), exact, dtype
        )
    else:
        assert results(swiglu, mixed, grad=grad)[1].shape == shape


def test_swiglu_takes_strided_inputs_and_shows_what_is_not_finite():
    wide = torch.randn(3, 4, 16, device=DEVICE)
    wide[0, 0, 0], wide[1, 0, 1], wide[2, 0, 2] = math.nan, math.inf, -math.inf
    mixed = wide.transpose(0, 1)[..., ::2]
    got, want = swiglu(mixed), gated(mixed)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    torch.testing.assert_close(got, want, equal_nan=True)


def llama(**changes):
    plain = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    return SimpleNamespace(**plain | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"gated_linear_unit": False},
        {"activation_func": torch.nn.functional.gelu},
        {"activation_func_clamp_value": 7.0},
        {"activation_func_fp8_input_store": True},
    ],
    ids=str,
)
def test_another_activation_is_refused(changes):
    check_fits(llama())
    with pytest.raises(NotImplementedError, match=next(iter(changes))):
        SwiGLU(llama(**changes))
