"""Batches of equal sequences as one packed sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def squash_batch_dim(x: Tensor) -> Tensor:
    """[b, s, ...] -> [b * s, ...]."""
    return x.flatten(0, 1)


def infer_varlen_mask_from_batch(
    batch_size: int, seq_len: int, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor]:
    """(cu_seqlens_q, cu_seqlens_k) of ``batch_size`` sequences of ``seq_len`` tokens.

    Both int32 [batch_size + 1]. They are read by the host, so the CPU is their best place.
    """
    cu_seqlens = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * seq_len
    return cu_seqlens, cu_seqlens


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Tokens from ``total_seqlen_q`` to the next multiple of ``cp_size * chunk_size``.

    Nothing here needs it: any length is padded inside.
    """
    return -total_seqlen_q % (cp_size * chunk_size)
