"""The fused RMSNorm against fp64, bounded by PyTorch's error. Interpreted on the CPU."""

import math
import weakref
from types import SimpleNamespace

import pytest
import torch

from tests.adapter.interpreter import DEVICE  # isort: skip

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused import norm
from megatron_magi.adapter.fused.norm import (
    BlockRMSNorm,
    FusedRMSNorm,
    add_rows_past_norm,
    rms_norm,
    rms_norm_and_rows,
)
from tests.adapter.fused.exactness import DTYPES, assert_as_good, results


def normed(x, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5)


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


@DTYPES
@pytest.mark.parametrize("shape", [(7, 1, 64), (4, 2, 100)])
def test_the_gradient_of_rows_that_go_past_the_norm_is_added(dtype, shape):
    """Behind the norm comes any function, here a product."""
    torch.manual_seed(shape[-1])
    x = (3 * torch.randn(shape, device=DEVICE)).to(dtype)
    weight = (1 + 0.3 * torch.randn(shape[-1], device=DEVICE)).to(dtype)
    grad = torch.randn(2, *shape, device=DEVICE).to(dtype)

    def fused(x, w):
        return torch.stack(rms_norm_and_rows(x, w, 1e-5))

    def plain(x, w):
        return torch.stack((normed(x, w), x))

    got, same = (results(way, x, weight, grad=grad) for way in (fused, plain))
    exact = results(plain, x.double(), weight.double(), grad=grad)
    assert torch.equal(got[0][1], x)
    assert_as_good(got, same, exact, dtype)


def test_no_rows_have_a_gradient_of_zero():
    x = torch.empty(0, 1, 16, device=DEVICE, requires_grad=True)
    weight = torch.ones(16, device=DEVICE, requires_grad=True)
    rms_norm(x, weight, 1e-5).sum().backward()
    assert x.grad.shape == x.shape and torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_of_the_two_is_enough(used):
    x, weight = torch.randn(5, 1, 32, device=DEVICE), torch.rand(32, device=DEVICE)
    grad = torch.randn_like(x)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = rms_norm_and_rows(*leaves, 1e-5)[used]
    got = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    if used:
        assert torch.equal(got[0], grad) and got[1] is None
    else:
        want = results(normed, x, weight, grad=grad)[1:]
        torch.testing.assert_close(list(got), want)


def block_norm():
    config = SimpleNamespace(
        normalization="RMSNorm", layernorm_zero_centered_gamma=False, params_dtype=torch.float32,
        sequence_parallel=False,
    )  # fmt: skip
    return BlockRMSNorm(config, 16).to(DEVICE)


def test_the_addition_of_a_layer_takes_the_rows_that_went_past_its_norm(monkeypatch):
    added = []

    def stock(training, fused):
        return lambda x_with_bias, residual, prob: added.append(residual) or residual + x_with_bias

    monkeypatch.setattr(norm, "get_bias_dropout_add", stock)
    module, x = block_norm(), torch.randn(3, 1, 16, device=DEVICE, requires_grad=True)
    hidden = x * 1
    out = add_rows_past_norm(True, False)(module(hidden).tanh(), hidden, 0.0)
    assert added[0] is not hidden and added[0].grad_fn.name() == "_RMSNormBackward"
    assert not vars(hidden), "the rows are taken"
    weight = module.weight
    want = torch.autograd.grad((x + normed(x, weight).tanh()).square().sum(), (x, weight))
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (x, weight)), want)
    add_rows_past_norm(True, False)(x, hidden, 0.0)
    assert added[1] is hidden, "without a norm before"


def test_without_gradients_nothing_is_left_for_the_addition():
    module, x = block_norm(), torch.randn(3, 1, 16, device=DEVICE, requires_grad=True)
    with torch.no_grad():  # as in the first pass of a recomputed layer
        module(x)
    assert not vars(x)


def test_rows_whose_addition_never_comes_are_freed():
    module, x = block_norm(), torch.randn(3, 1, 16, device=DEVICE, requires_grad=True)
    hidden = x * 1
    out, lives = module(hidden), weakref.ref(hidden)
    assert vars(hidden)
    del hidden, out
    assert lives() is None


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
