"""The one function by which Bridge's models share out a packed stream."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def get_packed_seq_cp_partition_indices(
    packed_seq_params: Any,
    *,
    total_tokens: int,
    cp_size: int,
    cp_rank: int,
    device: torch.device,
    cp_group: Any = None,
) -> Tensor:
    """Two mirrored pieces of every padded document (zigzag)."""
    bounds = packed_seq_params.cu_seqlens_q_padded
    if bounds is None:
        bounds = packed_seq_params.cu_seqlens_q
    rows = torch.arange(total_tokens, device=device)
    found = []
    for start, end in pairwise(bounds.tolist()):
        pieces = rows[start:end].chunk(2 * cp_size)
        found += [pieces[cp_rank], pieces[2 * cp_size - 1 - cp_rank]]
    return torch.cat(found)
