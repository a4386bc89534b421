"""Batches of equal sequences as one packed sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.checks import INT32_MAX, integer
from megatron_magi.core.tensor_checks import device as checked_device
from megatron_magi.core.tensor_checks import tensor


def squash_batch_dim(x: Tensor) -> Tensor:
    """[b, s, ...] -> [b * s, ...]."""
    tensor(x, "x")
    if x.ndim < 2:
        raise ValueError(
            f"x must be [batch, tokens, ...], got {list(x.shape)}; one sequence is packed already"
        )
    return x.flatten(0, 1)


def infer_varlen_mask_from_batch(
    batch_size: int, seq_len: int, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor]:
    """(cu_seqlens_q, cu_seqlens_k) of ``batch_size`` sequences of ``seq_len`` tokens.

    Both int32 [batch_size + 1]. They are read by the host, so the CPU is their best place.
    """
    batch_size = integer(batch_size, "batch_size", 0, INT32_MAX - 1)
    seq_len = integer(seq_len, "seq_len", 0, INT32_MAX)
    integer(batch_size * seq_len, "batch_size * seq_len", 0, INT32_MAX)
    place = checked_device(device)
    cu_seqlens = torch.arange(batch_size + 1, dtype=torch.int32, device=place) * seq_len
    return cu_seqlens, cu_seqlens


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Tokens from ``total_seqlen_q`` to the next multiple of ``cp_size * chunk_size``.

    Nothing here needs it: any length is padded inside.
    """
    total_seqlen_q = integer(total_seqlen_q, "total_seqlen_q", 0)
    cp_size, chunk_size = integer(cp_size, "cp_size", 1), integer(chunk_size, "chunk_size", 1)
    return -total_seqlen_q % (cp_size * chunk_size)
