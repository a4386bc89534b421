"""What every backend shares: where results go, and what a backward computes from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_magi.core.kernel.backend import (
    GradCall,
    acc_dtype,
    copy_grads_,
    final_delta,
    row_delta,
    scatter_rows_,
    subtract_dlse,
)
from megatron_magi.core.kernel.slice_table import SliceTable

F64 = torch.float64


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=F64)


def test_delta_is_summed_in_the_dtype_that_is_asked_for() -> None:
    """Of 4,096 equal ones a bf16 sum would stop at 256."""
    ones = torch.ones(1, 2, 4096, dtype=torch.bfloat16)
    made = row_delta(ones, ones, torch.float32)
    assert made.dtype == torch.float32 and made.tolist() == [[4096, 4096]]


def test_a_gradient_of_lse_is_taken_off_delta() -> None:
    delta, dlse = draw(3, 2), draw(3, 2) * 5
    assert subtract_dlse(delta, None) is delta
    assert torch.equal(subtract_dlse(delta, dlse), delta - dlse)


def test_delta_is_given_or_made_from_out() -> None:
    out, dout, lse = draw(3, 2, 5), draw(3, 2, 5) * 2, draw(3, 2)
    delta = draw(3, 2)
    assert final_delta(GradCall(dout, lse, delta), F64) is delta
    torch.testing.assert_close(
        final_delta(GradCall(dout, lse, out=out), F64), torch.einsum("thd,thd->th", out, dout)
    )
    for wrong in (GradCall(dout, lse), GradCall(dout, lse, delta, out)):
        with pytest.raises(ValueError, match="either delta or out is required, got none or both"):
            final_delta(wrong, F64)


def test_only_covered_rows_are_put_into_a_result() -> None:
    """Of two slices that touch, and one apart from them."""
    bands = [(1, 3, 0, 4, -9, 9), (3, 4, 0, 2, -9, 9), (6, 7, 0, 4, -9, 9)]
    table = SliceTable(np.array(bands, np.int32), 8, 4)
    rows = draw(8, 2, 5), draw(8, 2)
    into = torch.full((8, 2, 5), 7.0), torch.full((8, 2), 7.0)
    assert scatter_rows_(rows, table, into) is into
    for x, made in zip(into, rows, strict=True):
        assert torch.equal(x[[1, 2, 3, 6]], made[[1, 2, 3, 6]].float())
        assert (x[[0, 4, 5, 7]] == 7).all()


def test_gradients_are_delivered_where_they_are_wanted() -> None:
    grads = draw(4, 2, 5), draw(4, 2, 3)
    assert copy_grads_(grads, None) is grads
    buffer = torch.full((4, 3, 8), 7.0)
    wanted = buffer[:, 1:].split((5, 3), -1)
    assert copy_grads_(grads, wanted) is wanted
    assert torch.equal(buffer[:, 1:], torch.cat(grads, -1).float()) and (buffer[:, 0] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_in_fp32_or_in_fp64_for_fp64(dtype: torch.dtype) -> None:
    assert acc_dtype(dtype) == torch.float32 and acc_dtype(F64) == F64
