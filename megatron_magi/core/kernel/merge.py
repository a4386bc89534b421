"""Merging attention over two disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out_THD: Tensor, lse_TH: Tensor, part_THD: Tensor, part_lse_TH: Tensor) -> None:
    """Merge a second (out, lse) into the first, in place.

    ``lse = log(e^lse1 + e^lse2)`` and ``out = out1 e^(lse1 - lse) + out2 e^(lse2 - lse)``; where
    neither side saw a key, out stays 0 and lse -inf.

    Args:
        out_THD, part_THD: [T, H, D] in the accumulation dtype, D that of values.
        lse_TH, part_lse_TH: [T, H] natural log; part_THD must be 0 where its lse is -inf.
    """
    total = torch.logaddexp(lse_TH, part_lse_TH)
    safe = total.masked_fill(total == -torch.inf, 0.0)
    out_THD.mul_((lse_TH - safe).exp_().unsqueeze(-1))
    out_THD.add_(part_THD * (part_lse_TH - safe).exp_().unsqueeze(-1))
    lse_TH.copy_(total)
