"""Masks from cu_seqlens, windows and global tokens, as ranges with types.

The cells are MagiAttention's, also where queries and keys differ in number: a window aligns
the last query with the last key and drops queries that have no key of their own, global tokens
count from the start of the sample. Documents are rows of arrays, so thousands of them cost little.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_magi.checks import INT32_MAX, flag, integer
from megatron_magi.core.mask.builders import paired_prefix_sums, window_of
from megatron_magi.core.mask.slices import BAND_MAX, BAND_MIN, IntArray, slices_of_columns
from megatron_magi.core.native import solver
from megatron_magi.core.tensor_checks import device as checked_device
from megatron_magi.core.tensor_checks import on_host, tensor
from megatron_magi.magi_attention.mask_type import (
    AttnMaskType,
    GeneralAttnMaskType,
    TypedSlices,
    mask_types,
    typed_slices,
)
from megatron_magi.magi_attention.range import AttnRange
from megatron_magi.magi_attention.ranges import AttnRanges, check_ranges
from megatron_magi.magi_attention.renamed import tell_about_environment

__all__ = [
    "apply_padding", "compute_pad_size", "infer_attn_mask_from_cu_seqlens",
    "infer_attn_mask_from_sliding_window", "infer_varlen_mask_from_batch", "squash_batch_dim",
]  # fmt: skip

CuSeqlens = Tensor | Sequence[int]
"""Prefix sums; a host list or CPU tensor saves a copy from the device."""

Ints = npt.NDArray[np.int64]


def infer_attn_mask_from_sliding_window(
    q_range: AttnRange, k_range: AttnRange, window_size: tuple[int, int]
) -> TypedSlices:
    """One document under a window, as at most three slices.

    Args:
        q_range, k_range: the document's queries and keys. The last query sees the last key; with
            more queries than keys the first ones see nothing.
        window_size: (left, right) keys next to the diagonal; -1, or the number of keys - 1 and
            more, for no limit.

    Raises:
        ValueError: a window that is not two integers >= -1.
    """
    tell_about_environment()
    ends = (*AttnRange.from_range(q_range), *AttnRange.from_range(k_range))
    q0, q1, k0, k1 = (np.array([x]) for x in ends)
    return typed_slices(solver.canonical_slices(_window_slices(q0, q1, k0, k1, window_size)))


def infer_attn_mask_from_cu_seqlens(
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    global_window_size: int = 0,
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType], int, int]:
    """Packed documents, full, causal or under a window.

    Args:
        cu_seqlens_q, cu_seqlens_k: [num_docs + 1] prefix sums of queries and keys.
        causal: only with window_size (-1, -1); a causal window is (left, 0).
        global_window_size: with a window: query i of a document also sees keys
            ``[0, min(global_window_size, i + right + 1))`` of it. Without one it changes nothing.

    Returns:
        q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k

    Raises:
        ValueError: wrong prefix sums, causal with a window, a negative global window.
    """
    tell_about_environment()
    q, k = host_cu_seqlens(cu_seqlens_q, cu_seqlens_k)
    slices = cu_seqlens_slices(q, k, causal, window_size, global_window_size)
    if window_of(window_size) == (-1, -1):
        # One row per document, also for empty ones.
        kind = AttnMaskType.CAUSAL if causal else AttnMaskType.FULL
        q_ranges, k_ranges = (AttnRanges.from_ranges(pairwise(s.tolist())) for s in (q, k))
        return q_ranges, k_ranges, [kind] * (len(q) - 1), int(q[-1]), int(k[-1])
    return *typed_slices(solver.canonical_slices(slices)), int(q[-1]), int(k[-1])


def cu_seqlens_slices(
    cu_seqlens_q: Ints,
    cu_seqlens_k: Ints,
    causal: bool,
    window_size: tuple[int, int],
    global_window_size: int = 0,
) -> IntArray:
    """The same masks as banded slices, int32 [N, 6]."""
    # No sequence is longer than INT32_MAX; beyond it rows of keys would wrap around.
    global_window_size = min(integer(global_window_size, "global_window_size", 0), INT32_MAX)
    window_size = window_of(window_size)
    if flag(causal, "causal") and window_size != (-1, -1):
        raise ValueError(
            f"causal must be False with a window, got causal and {window_size}; "
            f"pass window_size=({window_size[0]}, 0) for a causal window"
        )
    q0, q1, k0, k1 = cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:]
    if window_size == (-1, -1):
        return slices_of_columns(q0, q1, k0, k1, BAND_MIN, k1 - q1 if causal else BAND_MAX)
    if global_window_size:
        return _global_slices(q0, q1, k0, k1, window_size, global_window_size)
    return _window_slices(q0, q1, k0, k1, window_size)


def _window_slices(q0: Ints, q1: Ints, k0: Ints, k1: Ints, window: tuple[int, int]) -> IntArray:
    """One slice per document."""
    left, right = _limits(window, k1 - k0)
    offset = k1 - q1
    first = np.maximum(q0, q1 - (k1 - k0))
    return slices_of_columns(first, q1, k0, k1, offset - left, offset + right)


def _global_slices(
    q0: Ints, q1: Ints, k0: Ints, k1: Ints, window: tuple[int, int], num_global: int
) -> IntArray:
    """Global keys, a window over the rest, and the rest for queries that the window drops."""
    right = _limits(window, k1 - k0)[1]
    split = np.minimum(k0 + num_global, k1)
    dropped_end = np.maximum(q1 - (k1 - split), q0)
    # The diagonal of dropped rows is that of the packed stream, as in MagiAttention; it is
    # the document's own wherever queries and keys are the same tokens.
    dropped = slices_of_columns(q0, dropped_end, split, k1, BAND_MIN, right)[right > 0]
    return np.concatenate(
        [
            slices_of_columns(q0, q1, k0, split, BAND_MIN, k0 - q0 + right),
            _window_slices(q0, q1, split, k1, window),
            dropped,
        ]
    )


def _limits(window: tuple[int, int], num_keys: Ints) -> tuple[Ints, Ints]:
    """(left, right) of every document, no limit as its number of keys."""
    sides = window_of(window)
    left, right = (np.where((w == -1) | (w >= num_keys - 1), num_keys, w) for w in sides)
    return left, right


def host_cu_seqlens(cu_seqlens_q: CuSeqlens, cu_seqlens_k: CuSeqlens) -> tuple[Ints, Ints]:
    """Both prefix sums on the host, int64.

    Raises:
        ValueError: sums that do not start at 0 or decrease, or name different documents.
    """
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    host = {n: on_host(sums, n) if isinstance(sums, Tensor) else sums for n, sums in given.items()}
    return paired_prefix_sums(host)


def apply_padding(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: GeneralAttnMaskType,
    total_seqlen: int,
    pad_size: int,
) -> TypedSlices:
    """A mask with one more slice at the end: ``pad_size`` queries that see nothing.

    Nothing here needs it: any length is padded inside.

    Args:
        q_ranges, k_ranges, attn_mask_type: row by row; they are copied.
        total_seqlen: where the padding begins.
    """
    check_ranges(q_ranges, "q_ranges")
    check_ranges(k_ranges, "k_ranges")
    total = integer(total_seqlen, "total_seqlen", 0)
    padding = AttnRange(total, total + integer(pad_size, "pad_size", 0))
    types = mask_types(attn_mask_type, len(q_ranges))
    if len(k_ranges) != len(q_ranges):
        raise ValueError(
            f"q_ranges and k_ranges must pair up, got {len(q_ranges)} and {len(k_ranges)}; "
            f"pass one k range per q range"
        )
    padded_q, padded_k = q_ranges.clone(), k_ranges.clone()
    padded_q.append(padding)
    padded_k.append(AttnRange(0, 0))
    return padded_q, padded_k, [*types, AttnMaskType.FULL]


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
