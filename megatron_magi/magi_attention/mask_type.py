"""Type codes at the public edge, and slices written with them.

Inside, a slice is a rectangle and a diagonal band; MagiAttention's four types are what is left of a
band whose edges either lie flat along the rectangle or move with the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from enum import Enum
from itertools import pairwise

import numpy as np

from megatron_magi.checks import integer, shown
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.mask.slices import IntArray, slices_from_ranges
from megatron_magi.magi_attention.range import AttnRange
from megatron_magi.magi_attention.ranges import AttnRanges, check_ranges


class AttnMaskType(Enum):
    """How a slice's rectangle is cut; i, j count its rows and keys, d = keys - rows."""

    FULL = "full"
    """Everything visible."""
    CAUSAL = "causal"
    """j <= i + d: the bottom-right corner lies on the diagonal."""
    INVCAUSAL = "inv_causal"
    """j >= i: the top-left corner lies on the diagonal."""
    BICAUSAL = "bi_causal"
    """Both."""

    @classmethod
    def from_int_type(cls, int_type: int) -> AttnMaskType:
        """From the code that kernels take: 0 FULL, 1 CAUSAL, 2 INVCAUSAL, 3 BICAUSAL."""
        return _BY_CODE[integer(int_type, "int_type", 0, len(_BY_CODE) - 1)]

    def to_int_type(self) -> int:
        """The code that kernels take."""
        return _BY_CODE.index(self)


_BY_CODE = tuple(AttnMaskType)
"""In the order of ``SliceType``'s codes."""

GeneralAttnMaskType = str | AttnMaskType | Sequence[str | AttnMaskType]
"""A type, or one per slice."""

TypedSlices = tuple[AttnRanges, AttnRanges, list[AttnMaskType]]
"""(q_ranges, k_ranges, attn_mask_type), one row per slice."""


def mask_types(attn_mask_type: GeneralAttnMaskType, num_slices: int) -> list[AttnMaskType]:
    """One type per slice; a single one stands for all.

    Raises:
        ValueError: another number of types, or an unknown name.
    """
    if isinstance(attn_mask_type, (str, AttnMaskType)):
        attn_mask_type = [attn_mask_type] * num_slices
    if not isinstance(attn_mask_type, Sequence):
        raise TypeError(
            f"attn_mask_type must be one type or a list of one per range, got "
            f"{shown(attn_mask_type)}; pass 'causal', or a list of such words"
        )
    if len(attn_mask_type) != num_slices:
        raise ValueError(
            f"attn_mask_type must be one type or one per range ({num_slices}), got "
            f"{len(attn_mask_type)}; repeat or cut the list"
        )
    return [_mask_type(t) for t in attn_mask_type]


def _mask_type(name: str | AttnMaskType) -> AttnMaskType:
    known = [t.value for t in AttnMaskType]
    if isinstance(name, AttnMaskType):
        return name
    if isinstance(name, str) and name in known:
        return AttnMaskType(name)
    near = get_close_matches(str(name).lower(), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "use one of them"
    raise ValueError(f"an attention mask type must be one of {known}, got {shown(name)}; {hint}")


def mask_from_typed(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: GeneralAttnMaskType,
    total_seqlen_q: int,
    total_seqlen_k: int,
) -> AttnMask:
    """The mask that ranges and types describe.

    Raises:
        ValueError: unpaired or out-of-bounds ranges, wrong types, slices that share a cell.
    """
    check_ranges(q_ranges, "q_ranges")
    check_ranges(k_ranges, "k_ranges")
    codes = [t.to_int_type() for t in mask_types(attn_mask_type, len(q_ranges))]
    q, k = (np.array(r.to_naive_ranges(), np.int64).reshape(-1, 2) for r in (q_ranges, k_ranges))
    return AttnMask(slices_from_ranges(q, k, codes), total_seqlen_q, total_seqlen_k)


def typed_slices(slices: IntArray) -> TypedSlices:
    """Canonical slices as ranges with types: the same cells, at most three rows per slice.

    Args:
        slices: int32 [N, 6], canonical.
    """
    q_ranges, k_ranges, types = AttnRanges(), AttnRanges(), []
    for q0, q1, k0, k1, d_lo, d_hi in slices.tolist():
        left, right = _first_moving_row(q0, q1, k0 - d_lo), _end_moving_row(q0, q1, k1 - 1 - d_hi)
        if q0 < right < q1 and right < left:
            right += 1  # In row `right` the edge lies at k1 both ways: give it to the shorter part.
        for start, end in pairwise(sorted({q0, left, right, q1})):
            moves_left, moves_right = start >= left, end <= right
            k_start = start + d_lo if moves_left else k0
            k_end = end + d_hi if moves_right else k1
            q_ranges.append(AttnRange(start, end))
            k_ranges.append(AttnRange(k_start, k_end))
            types.append(AttnMaskType.from_int_type(2 * moves_left + moves_right))
    return q_ranges, k_ranges, types


def _first_moving_row(q0: int, q1: int, row: int) -> int:
    """Where the left edge starts to move, when it lies at k0 up to ``row``; q1 for never."""
    return q1 if row >= q1 - 1 else max(row, q0)


def _end_moving_row(q0: int, q1: int, row: int) -> int:
    """Where the right edge ends to move, when it lies at k1 from ``row`` on; q0 for never."""
    if row <= q0:
        return q0
    return q1 if row >= q1 - 1 else row
