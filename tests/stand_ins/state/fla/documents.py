"""The document of every row."""

from __future__ import annotations

import torch
from torch import Tensor


def seq_idx_of(cu_seqlens: Tensor | None, length: int) -> Tensor | None:
    """[1, length]; the kernels of the real package fail on documents without a row, and so it is
    here."""
    if cu_seqlens is None:
        return None
    lengths = cu_seqlens.diff()
    assert bool((lengths > 0).all()) and int(cu_seqlens[-1]) == length, cu_seqlens.tolist()
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None]
