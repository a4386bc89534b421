"""The fused cross entropy against fp64, bounded by the plain path's error; on two ranks as on one.

Interpreted on the CPU.
"""

import math

import pytest
import torch
import torch.distributed as dist

from tests.adapter.interpreter import DEVICE  # isort: skip

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused.cross_entropy import cross_entropy
from tests.adapter.fused.exactness import DTYPES, EXP, ROUNDING, worst
from tests.process_pool import ProcessPool


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


WIDTH = 50
"""Words of one rank's part of the vocabulary."""


def case():
    """Logits of 2 * WIDTH words, labels at every part's edges, a weight that is 0."""
    torch.manual_seed(3)
    logits = 4 * torch.randn(4, 2, 2 * WIDTH)
    logits[0, 0, 3], logits[0, 1, WIDTH + 7] = 90.0, 90.0
    labels = torch.tensor([[0, WIDTH - 1], [WIDTH, 2 * WIDTH - 1], [3, 77], [9, 60]])
    weights = torch.rand(4, 2)
    weights[2, 0] = 0
    return logits, labels, weights


def losses_of_rank(rank):
    logits, labels, weights = case()
    own = logits[..., rank * WIDTH : (rank + 1) * WIDTH].contiguous().requires_grad_()
    losses = cross_entropy(own * 1.0, labels, dist.group.WORLD)
    (losses * weights).sum().backward()
    return losses.detach().numpy(), own.grad.numpy()


def test_cross_entropy_refuses_a_second_derivative():
    """Beside other terms it would be left out of the sum without an error."""
    logits = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    losses = cross_entropy(logits * 1, torch.tensor([1, 0, 7], device=DEVICE))
    (grad,) = torch.autograd.grad(losses.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(grad.square().sum() + logits.square().sum(), logits)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pool's processes are on the CPU")
def test_two_ranks_have_the_losses_and_gradients_of_one():
    logits, labels, weights = case()
    whole = logits.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(
        whole.flatten(0, 1), labels.flatten(), reduction="none"
    ).view(labels.shape)
    (exact * weights).sum().backward()
    pool = ProcessPool(2)
    try:
        ranks = pool.run(losses_of_rank)
    finally:
        pool.stop()
    for losses, _ in ranks:
        assert torch.allclose(torch.from_numpy(losses).double(), exact, rtol=1e-6, atol=1e-5)
    got = torch.cat([torch.from_numpy(grad) for _, grad in ranks], dim=-1)
    assert torch.allclose(got.double(), whole.grad, rtol=1e-5, atol=1e-6)
