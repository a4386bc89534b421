"""Softcap in the Hopper forward against the dense fp64 definition; see cuda_forward_cases.py."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.slice_table import SliceTable
from tests.core.kernel.cuda_forward_cases import (
    BF16,
    FP16,
    FP32,
    MASKS,
    WIDTHS,
    Case,
    backend,
    check,
    draw,
)

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")]

# Of scores of about 1: almost linear, and far in the bend.
CASES = [
    replace(case, mask=name, softcap=softcap)
    for name in ("packed", "window", "pad rows", "full")
    for softcap in (30.0, 0.7)
    for case in (
        Case("", (4, 4), 64), Case("", (8, 1), 64, dtype=FP16), Case("", (8, 2)),
        Case("", (4, 4), dtype=FP16, stages=2), Case("", (8, 2), 192, 128, FP16),
        Case("", (4, 4), 192, 128, strided=True, out_dtype=FP32),
        Case("", (8, 2), 256), Case("", (3, 3), 256, dtype=FP16, stages=2),
        Case("", (8, 2), 96), Case("", (3, 3), 96, dtype=FP16, stages=2),
    )
]  # fmt: skip
# The ways to compute a tanh, by the size of scores beside the cap: all small, most small, most
# beyond the cap. And the softmax of bf16: with a fixed shift up to a cap of 55, and above it not.
CASES += [
    replace(case, mask="packed", softcap=softcap, magnitude=magnitude)
    for softcap in (0.02, 30.0, 55.0, 56.0, 200.0)
    for magnitude in (0.15 * softcap, 0.4 * softcap, softcap, 4 * softcap)
    for case in (
        Case("", (8, 2)), Case("", (4, 4), dtype=FP16), Case("", (8, 1), 64, stages=2),
        Case("", (4, 4), 192, 128), Case("", (8, 2), 256), Case("", (8, 2), 96, dtype=FP16),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_named(case: Case) -> None:
    check(case, MASKS[case.mask], zlib.crc32(str(case).encode()))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("softcap", [55.0, 56.0])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_rows_whose_logits_are_all_at_the_cap(head_dim: int, softcap: float, sign: int) -> None:
    """Without a shift, their probabilities are the largest or the least that there are."""
    mask, case = masks.causal(3000), Case("", (16, 2), head_dim, softcap=softcap)
    q, k, v = draw(case, mask, 7)
    q, k, v = sign * (100 + q), 10 + k, 1e4 * v
    table, scale = SliceTable.of(mask), head_dim**-0.5
    most = torch.full((16,), -torch.inf, device="cuda")
    out, lse = backend().forward(AttnCall(q, k, v, table, scale, most, softcap))
    rows = torch.arange(1, 3001, device="cuda", dtype=torch.float64)[:, None]
    want = v.double().cumsum(0).repeat_interleave(8, 1) / rows[..., None]
    assert (out.double() - want).norm() / want.norm() < 4e-3
    assert (lse.double() - rows.log() - sign * softcap).abs().max() < 1e-3
    assert (most - sign * softcap).abs().max() < 1e-3


@pytest.mark.parametrize("softcap", [30.0, 100.0])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_blocks_with_several_items(
    widths: tuple[int, int], dtype: torch.dtype, softcap: float
) -> None:
    """What a block keeps from one item must not reach the next."""
    lengths = [3, 60, 900, 128, 1, 400, 64, 700, 33, 300, 8, 500]
    mask = masks.from_cu_seqlens(np.cumsum([0, *lengths]).tolist())
    check(Case("", (16, 16), *widths, dtype=dtype, softcap=softcap), mask, 3)
    check(Case("", (32, 4), *widths, dtype=dtype, softcap=softcap, magnitude=20.0), mask, 4)


@pytest.mark.parametrize("softcap", [30.0, 100.0])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_nan_stays_in_its_row(widths: tuple[int, int], softcap: float) -> None:
    """And the other rows keep their bits."""
    mask, case = MASKS["packed"], Case("", (4, 2), *widths)
    q, k, v = draw(case, mask, 4)
    bad = q.clone()
    bad[50, 1, 3] = torch.nan
    runs = [
        backend().forward(AttnCall(x, k, v, SliceTable.of(mask), 0.1, softcap=softcap))
        for x in (q, bad)
    ]
    for good, x in zip(*runs, strict=True):
        assert x[50, 1].isnan().all()
        x[50, 1] = good[50, 1]
        assert torch.equal(x, good)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_two_runs_give_equal_bits(widths: tuple[int, int]) -> None:
    mask = masks.from_cu_seqlens([0, 900, 1000, 4000])
    q, k, v = draw(Case("", (16, 2), *widths, magnitude=8.0), mask, 1)
    call = AttnCall(q, k, v, SliceTable.of(mask), 0.1, softcap=30.0)
    runs = [backend().forward(call) for _ in range(3)]
    for out, lse in runs[1:]:
        assert torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1])
