"""The gradient of sinks."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.core.kernel.sink_gradient import sink_gradient
from tests.core.kernel.test_sink import FP64, attended, sinks
from tests.dense import with_sinks


@pytest.mark.parametrize("shape", [(3,), (6, 3)])
def test_the_gradient_is_the_share_of_every_row(shape: tuple[int, ...]) -> None:
    """By autograd through the sums, out and lse both used."""
    (out, lse), logit = attended(), sinks(*shape).requires_grad_()
    generator = torch.Generator().manual_seed(1)
    dout, dlse = (torch.randn(x.shape, generator=generator, dtype=FP64) for x in (out, lse))
    made = with_sinks(out, lse, logit.unsqueeze(-2))
    (want,) = torch.autograd.grad(made, logit, (dout, dlse))
    delta = (made[0] * dout).sum(-1) - dlse
    got = sink_gradient(logit.detach(), made[1].detach(), delta.detach())
    torch.testing.assert_close(got, want)
