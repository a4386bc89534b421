"""delta, what every score gradient of a row subtracts: the row sum of out * dout."""

from __future__ import annotations

import torch
from torch import Tensor


def score_delta(
    out_THD: Tensor, dout_THD: Tensor, dlse_TH: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[T, H], what every score gradient subtracts: the row sum of out * dout, less dlse.

    d lse / d score is the softmax weight itself, so a gradient of lse only moves delta.
    """
    delta = row_delta(out_THD, dout_THD, dtype)
    return delta if dlse_TH is None else delta - dlse_TH


def row_delta(out_THD: Tensor, dout_THD: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H] sum over D, the head_dim of values, of out * dout."""
    if out_THD.is_cuda and dtype == torch.float32:
        from megatron_magi.core.kernel.cuda_backward import cuda_row_delta, has_cuda_row_delta

        if has_cuda_row_delta(out_THD, dout_THD):
            return cuda_row_delta(out_THD, dout_THD)
    return (out_THD.to(dtype) * dout_THD.to(dtype)).sum(-1)


def given_or_made(
    delta_TH: Tensor | None, out_THD: Tensor | None, dout_THD: Tensor, dtype: torch.dtype
) -> Tensor:
    """delta, or made from out where that was given instead.

    Raises:
        ValueError: both or none of them.
    """
    if (delta_TH is None) == (out_THD is None):
        raise ValueError("either delta or out is required, got none or both; pass one of them")
    if out_THD is not None:
        return row_delta(out_THD, dout_THD, dtype)
    assert delta_TH is not None
    return delta_TH
