"""Softcap in the Hopper backward where its polynomial is left; test_cuda_bwd.py has the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_magi import masks
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.hopper.backward import backward
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.slice_table import SliceTable

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
BF16, FP16 = torch.bfloat16, torch.float16
WIDTHS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]


def _drawn(widths: tuple[int, int], dtype: torch.dtype, low: float) -> list[Tensor]:
    """q, k, v, dout of 700 tokens. Every third key has scores near -low with all queries."""
    gen = torch.Generator("cuda").manual_seed(5)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(700, heads, width, generator=gen, device="cuda")

    q, k, v, dout = (
        normal(h, w) for h, w in ((4, widths[0]), (2, widths[0]), (2, widths[1]), (4, widths[1]))
    )
    q[..., 0], k[..., 0] = 16.0, 0.0
    k[::3, :, 0] = -low * widths[0] ** 0.5 / 16.0
    return [x.to(dtype) for x in (q, k, v, dout)]


def _check(inputs: list[Tensor], softcap: float, deterministic: bool, bound: float) -> None:
    q, k, v, dout = inputs
    mask = masks.causal(len(q))
    table = SliceTable(mask.slices, mask.total_seqlen_q, mask.total_seqlen_k)
    wide = [x.double() for x in inputs]
    exact = AttnCall(*wide[:3], table, q.shape[2] ** -0.5, softcap=softcap)
    reference = ReferenceBackend()
    out, lse = reference.forward(exact)
    delta = (out * wide[3]).sum(-1)
    want = reference.backward(exact, GradCall(wide[3], lse, delta))
    grad = GradCall(dout, lse.float(), delta.float())
    got = backward(exact._replace(q=q, k=k, v=v), grad._replace(deterministic=deterministic))
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert torch.isfinite(x).all(), name
        assert (x.double() - y).norm() <= bound * y.norm(), name


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("low", [30.0, 300.0, 3e4])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_scores_far_below_the_others(
    widths: tuple[int, int], dtype: torch.dtype, low: float, deterministic: bool
) -> None:
    """The rows' lse stay moderate, and such keys lie beyond the polynomial's range."""
    _check(_drawn(widths, dtype, low), 30.0, deterministic, 1e-2)


@pytest.mark.parametrize("softcap", [12.0, 20.0, 30.0, 80.0])
@pytest.mark.parametrize("shift", [-1.2, -0.7, -0.6, 0.6, 0.7, 1.2])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_rows_at_the_ends_of_the_moderate_range(
    widths: tuple[int, int], shift: float, softcap: float
) -> None:
    """All logits of a row are higher or lower, by a multiple of softcap: also rows whose lse is so
    low that keys beyond the range have a share in it."""
    q, k, v, dout = _drawn(widths, BF16, 0.0)
    k[..., 0] = shift * softcap * widths[0] ** 0.5 / 16.0
    # The lse is exact, and the instruction for tanh may err by 2^-11.
    _check([q, k, v, dout], softcap, False, 6e-3 + softcap * 2**-11)
