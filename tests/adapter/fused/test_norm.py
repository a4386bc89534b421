"""The fused RMSNorm against fp64, bounded by PyTorch's error. Interpreted on the CPU."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.adapter.interpreter import DEVICE  # isort: skip

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused import norm
from megatron_magi.adapter.fused.norm import FusedRMSNorm, rms_norm
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
