"""Weight gradients that the matrix product adds, and the place where Megatron looks for it."""

import importlib.util

import pytest
import torch

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused import weight_grad
from megatron_magi.adapter.fused.weight_grad import add_weight_gradient, has_apex, install_addmm
from tests.adapter.fused.exactness import DTYPES, worst


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="a 16-bit product into fp32 exists on CUDA alone"
)
@DTYPES
def test_weight_gradient_is_added_in_fp32(dtype):
    inputs, grads = (torch.randn(300, n, device="cuda").to(dtype) for n in (40, 24))
    total = torch.randn(24, 40, device="cuda")
    exact = total.double() + grads.double().t() @ inputs.double()
    add_weight_gradient(inputs, grads, total)
    assert worst(total, exact) <= 2e-5 * float(exact.abs().max())


def test_weight_gradient_adds_to_what_is_there():
    total = torch.ones(3, 2)
    add_weight_gradient(torch.ones(4, 2), torch.full((4, 3), 2.0), total)
    assert torch.equal(total, torch.full((3, 2), 9.0))


def test_megatrons_layers_get_it_under_apexs_name(monkeypatch):
    """Both of apex's names: the buffer's dtype decides which of them Megatron calls."""
    from megatron.core.tensor_parallel import layers

    monkeypatch.setattr(layers, weight_grad.APEX_MODULE, None, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    install_addmm()
    install_addmm()
    assert layers._grad_accum_fusion_available is True
    for dtype in (32, 16):
        total = torch.zeros(3, 2)
        add = getattr(layers.fused_weight_gradient_mlp_cuda, f"wgrad_gemm_accum_fp{dtype}")
        add(torch.ones(4, 2), torch.ones(4, 3), total)
        assert torch.equal(total, torch.full((3, 2), 4.0))


@pytest.mark.parametrize("is_there", [True, False])
def test_apex_is_looked_for_by_its_extension(is_there, monkeypatch):
    """Not by the package: one without compiled extensions has no fused product."""
    asked = []
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: asked.append(name) or (is_there or None)
    )
    assert has_apex() is is_there and asked == ["fused_weight_gradient_mlp_cuda"]
