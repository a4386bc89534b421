"""Fused SwiGLU and RMSNorm against fp64, bounded by PyTorch's error. Interpreted on the CPU."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.adapter.interpreter import DEVICE  # isort: skip

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused import norm
from megatron_magi.adapter.fused.norm import FusedRMSNorm, rms_norm
from megatron_magi.adapter.fused.swiglu import SwiGLU, check_fits, swiglu

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8 if DEVICE == "cuda" else 2.0**-7}
"""Half a unit of the last place; Triton's interpreter cuts bf16 off instead of rounding it."""
EXP = 2.0**-20
"""Relative error of the hardware's exponential, square root and division; torch's are exacter."""
DTYPES = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


def gated(mixed):
    gate, up = mixed.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def normed(x, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5)


def results(function, *inputs, grad):
    """Output and gradients of all inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def assert_as_good(fused, plain, exact, dtype):
    for got, same, want in zip(fused, plain, exact, strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        error, bound = ((x.double() - want).abs().max() for x in (got, same))
        assert error <= 1.5 * bound + max(ROUNDING[dtype], EXP) * want.abs().max()


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


@DTYPES
@pytest.mark.parametrize("programs", [1, 3, 528])
@pytest.mark.parametrize("shape", [(7, 1, 64), (4, 2, 100), (1, 1, 2048)])
def test_rms_norm_and_its_gradients(dtype, shape, programs, monkeypatch):
    monkeypatch.setattr(norm, "PROGRAMS", programs)
    torch.manual_seed(shape[-1])
    x = (3 * torch.randn(shape, device=DEVICE)).to(dtype)
    x[0, 0] = 0
    weight = (1 + 0.3 * torch.randn(shape[-1], device=DEVICE)).to(dtype)
    grad = torch.randn(shape, device=DEVICE).to(dtype)
    fused = results(lambda x, w: rms_norm(x, w, 1e-5), x, weight, grad=grad)
    plain = results(normed, x, weight, grad=grad)
    exact = results(normed, x.double(), weight.double(), grad=grad)
    assert_as_good(fused, plain, exact, dtype)
    again = results(lambda x, w: rms_norm(x, w, 1e-5), x, weight, grad=grad)
    assert all(torch.equal(a, b) for a, b in zip(fused, again, strict=True))


def test_rms_norm_shows_what_is_not_finite():
    x = torch.randn(4, 1, 8, device=DEVICE)
    x[1, 0, 2], x[2, 0, 3] = math.nan, math.inf
    weight = torch.ones(8, device=DEVICE)
    got, want = rms_norm(x, weight, 1e-5), normed(x, weight)
    assert torch.equal(got.isnan(), want.isnan())
    torch.testing.assert_close(got, want, equal_nan=True)


def test_a_norm_of_other_columns_is_refused():
    with pytest.raises(ValueError, match=r"weight of 8 columns.*got \[4\]; set model.fused=off"):
        rms_norm(torch.ones(2, 8, device=DEVICE), torch.ones(4, device=DEVICE), 1e-5)
    wide = torch.ones(1, norm.WIDEST + 1, device=DEVICE)
    with pytest.raises(ValueError, match="at most 16,384"):
        rms_norm(wide, wide[0], 1e-5)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_norm_has_megatrons_constructor_and_mark(sequence_parallel):
    config = SimpleNamespace(
        normalization="RMSNorm", layernorm_zero_centered_gamma=False, params_dtype=torch.float32,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    module = FusedRMSNorm(config, 16, eps=1e-5).to(DEVICE)
    assert module.weight.sequence_parallel is sequence_parallel
    assert list(module.state_dict()) == ["weight"]
    x = torch.randn(3, 1, 16, device=DEVICE)
    torch.testing.assert_close(module(x), normed(x, module.weight))
