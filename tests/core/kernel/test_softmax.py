"""Softcap and scale: the derivative, limits, and values that are refused."""

import math

import pytest
import torch
from torch import Tensor

from megatron_magi import masks
from megatron_magi.core.kernel.attention import flex_flash_attn_func
from tests.core.kernel.test_attention import MASKS
from tests.dense import random_qkv


def test_the_derivative_of_capped_logits() -> None:
    """Of out and lse, by differences."""
    q, k, v, _ = random_qkv(MASKS["pad rows"], 2, 1, 4, torch.float64, 5)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, meta = flex_flash_attn_func(q, k, v, slices=MASKS["pad rows"], softcap=0.7)
        return out, meta.lse[:8]  # behind them no row sees a key: their lse is -inf

    assert torch.autograd.gradcheck(attention, (q, k, v))


def test_a_far_cap_changes_little_and_a_near_one_bounds() -> None:
    q, k, v, _ = random_qkv(masks.causal(40), 4, 2, 8, torch.float64, 2)
    asked = {"slices": masks.causal(40), "return_max_logits": True}
    out, plain = flex_flash_attn_func(q, k, v, **asked)
    far = flex_flash_attn_func(q, k, v, **asked, softcap=1e6)[0]
    torch.testing.assert_close(far, out, rtol=1e-9, atol=1e-9)
    _, near = flex_flash_attn_func(q * 100, k, v, **asked, softcap=0.5)
    assert plain.max_logits is not None and near.max_logits is not None
    assert (plain.max_logits > 0.5).all() and (near.max_logits <= 0.5).all()


@pytest.mark.parametrize("scale", [0.0, -0.1, 1e-40, 1e31, math.inf, math.nan])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    """The kernels divide by it and take its logarithm."""
    q = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"softmax_scale must be .*; pass"):
        flex_flash_attn_func(q, q, q, softmax_scale=scale)


@pytest.mark.parametrize("softcap", [-1.0, 1e-40, 1e31, 1e300, math.inf, math.nan])
def test_a_cap_that_is_none_is_refused(softcap: float) -> None:
    q = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"softcap must be .*; pass"):
        flex_flash_attn_func(q, q, q, softcap=softcap)
