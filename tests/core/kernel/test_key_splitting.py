"""Parts of a call are merged: rows, sinks and infinite scores, by FlexAttention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.core.kernel import torch_flex
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.merge import merge_
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.kernel.split_slices import table_parts
from megatron_magi.core.kernel.torch_flex import FlexBackend
from megatron_magi.core.mask import AttnMask
from tests.core.kernel.test_torch_flex import (
    CPU,
    MASKS,
    check_against_fp64,
    dense_flex,
    inputs,
    unseen_rows,
)
from tests.dense import dense_attention, random_qkv


def two_halves() -> AttnMask:
    """Rows that see the first keys only, the last keys only, all of them, or nothing."""
    rows = ((0, 40, 0, 60), (40, 80, 60, 120), (90, 130, 0, 120))
    slices = [[a, b, 2 * i, 2 * i + 1, -300, 300] for a, b, c, d in rows for i in range(c, d)]
    return AttnMask(np.array(slices, np.int32), 140, 240)


def test_rows_that_see_nothing_in_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """And something in another; a row block's first part has the keys of all of its rows."""
    mask = two_halves()
    seen = [
        set(np.flatnonzero(empty)) for empty in map(unseen_rows, table_parts(SliceTable.of(mask)))
    ]
    assert len(seen) == 4 and seen[0] != seen[-1]
    assert set.intersection(*seen) == {*range(80, 90), *range(130, 140)}

    def use_dense() -> None:
        monkeypatch.setattr(torch_flex, "_flex", lambda device_type: dense_flex)

    check_against_fp64(mask, "cpu", torch.float32, use_dense)


@pytest.mark.parametrize("name, has_sinks", [("33-slices-a-row", False), ("causal", True)])
def test_parts_and_sinks_are_merged_in_fp32(name: str, has_sinks: bool) -> None:
    mask = MASKS[name]
    q, k, v = (x.detach() for x in random_qkv(mask, 4, 2, 16, torch.bfloat16, 3)[:3])
    sinks = torch.zeros(4) if has_sinks else None
    call = AttnCall(q, k, v, SliceTable.of(mask), 0.25, sink_lse=sinks)
    out, _ = FlexBackend().forward(call, out_dtype=torch.float32)
    assert not torch.equal(out, out.bfloat16().float()), "sums were rounded to 16 bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stage_of_several_parts(dtype: torch.dtype) -> None:
    """Merged into what came before, put into other rows, or returned in the dtype asked for."""
    table = SliceTable.of(two_halves())
    q, k, v, _ = inputs(two_halves(), CPU, dtype)
    call, tol = AttnCall(q, k, v, table, 0.2), 1e-5 if dtype == torch.float32 else 2e-2
    want = ReferenceBackend().forward(call, out_dtype=torch.float32)
    earlier = torch.randn_like(want[0]), torch.randn_like(want[1])
    merged, put = ((earlier[0].clone(), earlier[1].clone()) for _ in range(2))
    assert FlexBackend().forward(call, prev=merged) is merged
    assert FlexBackend().forward(call, into=put) is put
    plain = FlexBackend().forward(call, out_dtype=torch.float64)
    assert (plain[0].dtype, plain[1].dtype) == (torch.float64, torch.float32)
    rows = ~unseen_rows(table)
    for got, started, expected in zip(put, earlier, want, strict=True):
        torch.testing.assert_close(got[rows], expected[rows], atol=tol, rtol=tol)
        assert torch.equal(got[~rows], started[~rows])
    merge_(*earlier, *want)
    torch.testing.assert_close(merged, earlier, atol=tol, rtol=tol)
    torch.testing.assert_close(plain, want, atol=tol, rtol=tol, check_dtype=False)


def test_a_part_of_infinite_scores_is_left_out() -> None:
    """-inf is a score of weight 0: nan comes if all scores of a row are -inf, or one is inf."""
    mask = two_halves()
    q, k, v, _ = inputs(mask, CPU, torch.float32)
    q[..., 0] = q[..., 0].abs() + 1
    k[:100, :, 0], k[239, :, 0] = -torch.inf, torch.inf
    call = AttnCall(q, k, v, SliceTable.of(mask), 0.2)
    out, lse = FlexBackend().forward(call)
    want = dense_attention(q.double(), k.double(), v.double(), mask, 0.2)
    assert out[90:130].isfinite().all() and not want[0].isnan().all()
    torch.testing.assert_close(out.double(), want[0], atol=1e-5, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse.double(), want[1], atol=1e-5, rtol=1e-5, equal_nan=True)
