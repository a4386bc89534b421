"""Softcap in the Hopper backward where its polynomial is left; test_cuda_bwd.py has the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_magi import masks
from megatron_magi.core.kernel.hopper.backward import backward
from tests.core.kernel.cuda_bwd_cases import Case
from tests.core.kernel.test_cuda_bwd import HOPPER, WIDTHS, Run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
FIRST = 16.0
"""Column 0 of all queries."""


def _case(widths: tuple[int, int], dtype: torch.dtype, softcap: float) -> Case:
    return Case("left", masks.causal(700), (4, 2), *widths, dtype, softcap=softcap)


def _check(case: Case, keys: slice, score: float, deterministic: bool) -> None:
    """Scores of `keys` are raised by `score`, all others are normal."""
    gen = torch.Generator("cuda").manual_seed(5)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(700, heads, width, generator=gen, device="cuda").to(case.dtype)

    (heads_q, heads_kv), (width, value_dim) = case.heads, case.widths
    q, k = normal(heads_q, width), normal(heads_kv, width)
    q[..., 0], k[..., 0] = FIRST, 0.0
    k[keys, :, 0] = score * width**0.5 / FIRST
    run = Run(case, (q, k, normal(heads_kv, value_dim), normal(heads_q, value_dim)))
    run.check(backward(run.call, run.grad._replace(deterministic=deterministic)))


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("low", [30.0, 300.0, 3e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_scores_far_below_the_others(
    widths: tuple[int, int], dtype: torch.dtype, low: float, deterministic: bool
) -> None:
    """The rows' lse stay moderate, and such keys lie beyond the polynomial's range."""
    _check(_case(widths, dtype, 30.0), slice(1, None, 3), -low, deterministic)


@pytest.mark.parametrize(
    ("softcap", "shift"),
    [(20.0, -0.18), (20.0, 0.42), (30.0, -0.38), (30.0, 0.5), (40.0, -0.45), (40.0, 0.55)],
)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_rows_at_the_ends_of_the_moderate_range(
    widths: tuple[int, int], softcap: float, shift: float
) -> None:
    """All logits of a row are higher or lower, by a multiple of softcap. Of these causal rows the
    lse of some are moderate and those of others are not."""
    _check(_case(widths, torch.bfloat16, softcap), slice(None), shift * softcap, False)
