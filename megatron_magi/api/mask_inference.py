"""Masks from cu_seqlens, windows and global tokens, as ranges with types.

The cells are the reference system's, also where queries and keys differ in number: a window aligns
the last query with the last key and drops queries that have no key of their own, global tokens
count from the start of the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

from megatron_magi.api.mask_type import AttnMaskType, TypedSlices, typed_slices
from megatron_magi.api.ranges import AttnRange, AttnRanges
from megatron_magi.core.mask import AttnSlice
from megatron_magi.core.mask.slices import BAND_MIN, IntArray, as_slices
from megatron_magi.core.native import solver

CuSeqlens = Tensor | Sequence[int]
"""Prefix sums; a host list or CPU tensor saves a copy from the device."""


def infer_attn_mask_from_sliding_window(
    q_range: AttnRange, k_range: AttnRange, window_size: tuple[int, int]
) -> TypedSlices:
    """One document under a window, as at most three slices.

    Args:
        q_range, k_range: the document's queries and keys. The last query sees the last key; with
            more queries than keys the first ones see nothing.
        window_size: (left, right) keys beside the diagonal; -1, or the number of keys - 1 and
            more, for no limit.

    Raises:
        ValueError: a window that is not two integers >= -1.
    """
    return typed_slices(_canonical(window_slices(q_range, k_range, window_size)))


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
    q, k = host_cu_seqlens(cu_seqlens_q, cu_seqlens_k)
    if tuple(window_size) == (-1, -1):
        kind = AttnMaskType.CAUSAL if causal else AttnMaskType.FULL
        typed = (
            AttnRanges.from_ranges(pairwise(q)),
            AttnRanges.from_ranges(pairwise(k)),
            [kind] * (len(q) - 1),
        )
    else:
        typed = typed_slices(
            _canonical(cu_seqlens_slices(q, k, causal, window_size, global_window_size))
        )
    return *typed, q[-1], k[-1]


def cu_seqlens_slices(
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    causal: bool,
    window_size: tuple[int, int],
    global_window_size: int = 0,
) -> list[AttnSlice]:
    """The same masks as slices."""
    if global_window_size < 0:
        raise ValueError(
            f"global_window_size must be >= 0, got {global_window_size}; use 0 for none"
        )
    if causal and tuple(window_size) != (-1, -1):
        raise ValueError(
            f"causal must be False with a window, got causal and {window_size}; "
            f"pass window_size=({window_size[0]}, 0) for a causal window"
        )
    slices: list[AttnSlice] = []
    for q, k in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True):
        q_range, k_range = AttnRange(*q), AttnRange(*k)
        if causal:
            d_hi = k_range.end - q_range.end
            slices.append(AttnSlice(q[0], q[1], k[0], k[1], BAND_MIN, d_hi))
        elif global_window_size and tuple(window_size) != (-1, -1):
            slices += _global_slices(q_range, k_range, window_size, global_window_size)
        else:
            slices += window_slices(q_range, k_range, window_size)
    return slices


def window_slices(
    q_range: AttnRange, k_range: AttnRange, window_size: tuple[int, int]
) -> list[AttnSlice]:
    """A window over one document: one slice."""
    left, right = _window(window_size, k_range.seqlen)
    offset = k_range.end - q_range.end
    q_start = max(q_range.start, q_range.end - k_range.seqlen)
    d_lo, d_hi = offset - left, offset + right
    return [AttnSlice(q_start, q_range.end, k_range.start, k_range.end, d_lo, d_hi)]


def _global_slices(
    q_range: AttnRange, k_range: AttnRange, window_size: tuple[int, int], num_global: int
) -> list[AttnSlice]:
    """Global keys, a window over the rest, and the rest for queries that the window drops."""
    right = _window(window_size, k_range.seqlen)[1]
    split = min(k_range.start + num_global, k_range.end)
    d_hi = k_range.start - q_range.start + right
    slices = [AttnSlice(q_range.start, q_range.end, k_range.start, split, BAND_MIN, d_hi)]
    rest = AttnRange(split, k_range.end)
    if rest.is_empty():
        return slices
    slices += window_slices(q_range, rest, window_size)
    dropped_end = q_range.end - rest.seqlen
    if dropped_end > q_range.start and right > 0:
        # The diagonal of these rows is that of the packed stream, as in the reference system; it
        # is the document's own wherever queries and keys are the same tokens.
        slices.append(AttnSlice(q_range.start, dropped_end, rest.start, rest.end, BAND_MIN, right))
    return slices


def _window(window_size: tuple[int, int], num_keys: int) -> tuple[int, int]:
    """(left, right) with no limit as the number of keys."""
    if len(window_size) != 2 or min(window_size) < -1:
        raise ValueError(
            f"window_size must be (left, right) keys, each >= -1, got {window_size}; "
            f"use -1 for no limit"
        )
    left, right = (num_keys if w == -1 or w >= num_keys - 1 else w for w in window_size)
    return left, right


def host_cu_seqlens(
    cu_seqlens_q: CuSeqlens, cu_seqlens_k: CuSeqlens
) -> tuple[list[int], list[int]]:
    """Both prefix sums as host integers.

    Raises:
        ValueError: sums that do not start at 0 or decrease, or name different documents.
    """
    sums = []
    for name, given in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        host = np.asarray(given.tolist() if isinstance(given, Tensor) else given)
        is_sums = host.ndim == 1 and len(host) > 0 and np.issubdtype(host.dtype, np.integer)
        if not is_sums or host[0] != 0 or (np.diff(host) < 0).any():
            raise ValueError(
                f"{name} must be integer prefix sums [num_docs + 1] that start at 0 and never "
                f"decrease, got {host.tolist()}; pass cumulative document lengths"
            )
        sums.append([int(x) for x in host])
    if len(sums[0]) != len(sums[1]):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must name the same documents, got "
            f"{len(sums[0]) - 1} and {len(sums[1]) - 1}; pass one length per document in both"
        )
    return sums[0], sums[1]


def _canonical(slices: list[AttnSlice]) -> IntArray:
    """Tight rectangles with finite bands, empty slices dropped, order kept."""
    return solver.canonical_slices(as_slices(slices))
