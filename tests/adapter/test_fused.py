"""Fused parts against fp64, bounded by the plain path's error. Interpreted on the CPU."""

import math

import pytest
import torch

from tests.adapter.interpreter import DEVICE  # isort: skip

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused.cross_entropy import cross_entropy
from megatron_magi.adapter.fused.qkv_rope import split_and_rotate
from megatron_magi.adapter.fused.weight_grad import add_weight_gradient

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
EXP = 2.0**-20
"""Relative error of the hardware's exponential, argument rounding included; torch's is exacter."""
DTYPES = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


def worst(got, exact):
    return float((got.double() - exact).abs().max())


def exact_losses(logits, labels):
    wide = logits.detach().double().requires_grad_()
    losses = wide.logsumexp(-1) - wide.gather(-1, labels[..., None])[..., 0]
    return wide, losses


def plain_losses(logits, labels):
    """Megatron's plain path on one rank: an fp32 copy, its softmax, rounded at the end."""
    own = logits.detach().clone().requires_grad_()
    losses = torch.nn.functional.cross_entropy(
        own.float().flatten(0, -2), labels.flatten(), reduction="none"
    )
    return own, losses.view(labels.shape)


@DTYPES
@pytest.mark.parametrize("width", [7, 4096, 9001])
def test_cross_entropy_and_its_gradient(dtype, width):
    torch.manual_seed(width)
    logits = (4 * torch.randn(3, 2, width, device=DEVICE)).to(dtype)
    logits[0, 0] = 0
    logits[1, 1, 3] = 80
    labels = torch.randint(0, width, (3, 2), device=DEVICE)
    labels[0, 1] = width - 1
    weights = torch.rand(3, 2, device=DEVICE)
    weights[2, 0] = 0
    wide, exact = exact_losses(logits, labels)
    (exact * weights).sum().backward()
    own, plain = plain_losses(logits, labels)
    (plain * weights).sum().backward()
    leaf = logits.clone().requires_grad_()
    fused = cross_entropy(leaf * 1.0, labels)
    (fused * weights).sum().backward()
    assert fused.dtype == torch.float32
    scale = float(exact.detach().abs().max())
    assert worst(fused, exact.detach()) <= 1.5 * worst(plain, exact.detach()) + scale * EXP
    step = max(ROUNDING[dtype], EXP) * float(wide.grad.abs().max())
    assert worst(leaf.grad, wide.grad) <= 1.5 * worst(own.grad, wide.grad) + step
    assert not leaf.grad[2, 0].any(), "a row that does not count has no gradient"


def test_cross_entropy_shows_inf_and_nan_where_pytorch_does():
    logits = torch.zeros(4, 1, 50, device=DEVICE)
    logits[0, 0, 3], logits[1, 0, 3], logits[2, 0, 3] = math.inf, math.nan, -math.inf
    labels = torch.full((4, 1), 3, device=DEVICE)
    _, plain = plain_losses(logits, labels)
    fused = cross_entropy(logits.clone(), labels)
    assert torch.equal(torch.isnan(fused), torch.isnan(plain))
    assert torch.equal(torch.isinf(fused), torch.isinf(plain))


def test_cross_entropy_refuses_a_second_backward_pass():
    leaf = torch.randn(2, 1, 9, device=DEVICE, requires_grad=True)
    loss = cross_entropy(leaf * 1.0, torch.zeros(2, 1, dtype=torch.long, device=DEVICE)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


def exact_rope(mixed, angles, groups, head_dim):
    """Split and rotate-half RoPE as others write it, in the dtype of `mixed`."""
    rows, batch, width = mixed.shape
    per_group = width // head_dim // groups - 2
    q, k, v = mixed.view(rows, batch, groups, -1).split(
        [per_group * head_dim, head_dim, head_dim], dim=3
    )
    cos, sin = (f(angles.to(torch.float64)).to(mixed.dtype) for f in (torch.cos, torch.sin))

    def rotate(x):
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-high, low], dim=-1) * sin

    return rotate(q.reshape(rows, batch, -1, head_dim)), rotate(k), v


@DTYPES
@pytest.mark.parametrize(
    "rows, batch, groups, per_group, head_dim",
    [(5, 1, 2, 3, 8), (40, 2, 1, 4, 12), (33, 1, 3, 1, 64), (70, 1, 2, 4, 128)],
)
def test_split_and_rotate(dtype, rows, batch, groups, per_group, head_dim):
    torch.manual_seed(rows)
    mixed = torch.randn(rows, batch, groups * (per_group + 2) * head_dim, device=DEVICE).to(dtype)
    half = torch.randint(0, 300_000, (rows, 1), device=DEVICE) * torch.rand(1, head_dim // 2).to(
        DEVICE
    )
    angles = torch.cat([half, half], dim=-1)[:, None, None]

    torch.manual_seed(1)
    weights = [torch.randn(rows, batch, h, head_dim, device=DEVICE).to(dtype)
               for h in (groups * per_group, groups, groups)]  # fmt: skip

    def results_of(function, values):
        leaf = values.clone().requires_grad_()
        results = function(leaf, angles, groups, head_dim)
        sum((x * w.to(x.dtype)).sum() for x, w in zip(results, weights, strict=True)).backward()
        return [*(x.detach() for x in results), leaf.grad]

    exact = results_of(exact_rope, mixed.double())
    plain = results_of(exact_rope, mixed)
    fused = results_of(split_and_rotate, mixed)
    for got, other, want in zip(fused, plain, exact, strict=True):
        assert got.shape == want.shape and got.dtype == dtype and got.is_contiguous()
        # Sine and cosine of large fp32 angles differ in their last bits.
        step = max(ROUNDING[dtype], 2.0**-20) * float(want.abs().max())
        assert worst(got, want) <= 1.5 * worst(other, want) + step


def test_split_and_rotate_refuses_partial_rotary_dimensions():
    with pytest.raises(ValueError, match="rotary_percent must be 1"):
        split_and_rotate(
            torch.zeros(4, 1, 48, device=DEVICE), torch.zeros(4, 1, 1, 8, device=DEVICE), 1, 16
        )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="a 16-bit product into fp32 exists on CUDA alone")
@DTYPES
def test_weight_gradient_is_added_in_fp32(dtype):
    inputs, grads = (torch.randn(300, n, device=DEVICE).to(dtype) for n in (40, 24))
    total = torch.randn(24, 40, device=DEVICE)
    exact = total.double() + grads.double().t() @ inputs.double()
    add_weight_gradient(inputs, grads, total)
    assert worst(total, exact) <= 2e-5 * float(exact.abs().max())


def test_weight_gradient_adds_to_what_is_there():
    total = torch.ones(3, 2)
    add_weight_gradient(torch.ones(4, 2), torch.full((4, 3), 2.0), total)
    assert torch.equal(total, torch.full((3, 2), 9.0))
