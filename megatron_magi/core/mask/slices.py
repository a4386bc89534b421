"""AttnSlice: a rectangle of (query, key) cells cut by a diagonal band.

A cell (q, k) is visible iff ``q_start <= q < q_end``, ``k_start <= k < k_end`` and
``d_lo <= k - q <= d_hi``. Cutting a slice by a rectangle does not change the band, moving it to
another index space shifts the band, and its area has a closed form, so one type serves planning,
communication and kernels. The algebra is in C++ (``csrc/planner/slices.h``); this file wraps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from megatron_magi.checks import int_array, integer, shown
from megatron_magi.core.native import solver

IntArray = npt.NDArray[np.int32]

BAND_MIN = -(2**31)
"""The ``d_lo`` of a band without a lower edge."""
BAND_MAX = 2**31 - 1
"""The ``d_hi`` of a band without an upper edge."""


class SliceType(IntEnum):
    """MagiAttention's type codes; bit 0 moves the right edge with the row, bit 1 the left edge."""

    FULL = 0
    CAUSAL = 1
    INV_CAUSAL = 2
    BI_CAUSAL = 3


@dataclass(frozen=True, order=True)
class AttnSlice:
    """One banded rectangle; its ranges are half-open, in tokens.

    ``BAND_MIN`` and ``BAND_MAX`` mean that the band has no limit on that side.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    d_lo: int = BAND_MIN
    d_hi: int = BAND_MAX

    def __post_init__(self) -> None:
        for name, value in list(self.__dict__.items()):
            if type(value) is not int or not BAND_MIN <= value <= BAND_MAX:
                checked = integer(value, f"AttnSlice.{name}", BAND_MIN, BAND_MAX)
                object.__setattr__(self, name, checked)

    def array(self) -> IntArray:
        """int32 [1, 6]."""
        return np.array([astuple(self)], dtype=np.int32)

    def canonical(self) -> AttnSlice | None:
        """The same cells with a tight rectangle and a finite band; None if there are none."""
        return _first(solver.canonical_slices(self.array()))

    def area(self) -> int:
        """Number of visible cells."""
        return int(solver.slice_areas(self.array())[0])

    def cut(self, q_start: int, q_end: int, k_start: int, k_end: int) -> AttnSlice | None:
        """The canonical part inside a rectangle, None if nothing is visible there."""
        corners = {"q_start": q_start, "q_end": q_end, "k_start": k_start, "k_end": k_end}
        q_start, q_end, k_start, k_end = (
            integer(value, name, BAND_MIN, BAND_MAX) for name, value in corners.items()
        )
        return _first(solver.cut_slices(self.array(), q_start, q_end, k_start, k_end))

    def shift(self, dq: int, dk: int) -> AttnSlice:
        """The same cells after moving queries by ``dq`` and keys by ``dk``."""
        dq, dk = integer(dq, "dq"), integer(dk, "dk")
        move = dk - dq
        d_lo = self.d_lo if self.d_lo == BAND_MIN else self.d_lo + move
        d_hi = self.d_hi if self.d_hi == BAND_MAX else self.d_hi + move
        return AttnSlice(
            self.q_start + dq, self.q_end + dq, self.k_start + dk, self.k_end + dk, d_lo, d_hi
        )


def _first(slices: IntArray) -> AttnSlice | None:
    return AttnSlice(*map(int, slices[0])) if len(slices) else None


def as_slices(slices: Sequence[AttnSlice] | npt.ArrayLike) -> IntArray:
    """int32 [N, 6] from AttnSlices or an array; bounds are checked by AttnMask.

    Raises:
        ValueError: if the array is not [N, 6] or does not fit int32.
        TypeError: if it does not hold integers.
    """
    if not hasattr(slices, "__len__"):
        raise TypeError(
            f"slices must be a list of AttnSlice or an array [num_slices, 6], got "
            f"{shown(slices)}; put the slices in a list"
        )
    if isinstance(slices, (list, tuple)):
        slices = [astuple(s) if isinstance(s, AttnSlice) else s for s in slices]
    array = int_array(slices, "slices")
    if array.size == 0:
        return np.zeros((0, 6), dtype=np.int32)
    if array.ndim != 2 or array.shape[1] != 6:
        raise ValueError(
            f"slices must have shape [num_slices, 6] (q_start, q_end, k_start, k_end, d_lo, d_hi), "
            f"got {list(array.shape)}; pass AttnSlices or rows of six integers"
        )
    return _to_int32(array, "slices")


def slices_from_ranges(
    q_ranges: npt.ArrayLike,
    k_ranges: npt.ArrayLike,
    attn_type_map: npt.ArrayLike | None = None,
) -> IntArray:
    """MagiAttention's ranges and type codes as banded slices.

    Args:
        q_ranges: [num_slices, 2], row i of both ranges is slice i.
        k_ranges: [num_slices, 2].
        attn_type_map: [num_slices] of ``SliceType`` codes; None means all FULL.

    Returns:
        int32 [num_slices, 6]: CAUSAL aligns the rectangle's bottom-right corners
        (``d_hi = k_end - q_end``), INV_CAUSAL the top-left ones (``d_lo = k_start - q_start``).

    Raises:
        ValueError: wrong shape, unpaired ranges, an end before its start, an unknown code.
    """
    q, k = _ranges(q_ranges, "q_ranges"), _ranges(k_ranges, "k_ranges")
    if len(q) != len(k):
        raise ValueError(
            f"q_ranges and k_ranges must pair up, got {len(q)} and {len(k)} rows; "
            f"pass one k range per q range"
        )
    types = _type_codes(attn_type_map, len(q))
    out = np.empty((len(q), 6), dtype=np.int32)
    out[:, 0:2], out[:, 2:4] = q, k
    out[:, 4] = np.where(types & 2, k[:, 0] - q[:, 0], BAND_MIN)
    out[:, 5] = np.where(types & 1, k[:, 1] - q[:, 1], BAND_MAX)
    return out


def slices_of_columns(*columns: npt.NDArray[np.int64] | int) -> IntArray:
    """int32 [N, 6] of the six columns, each one number for all slices or [N].

    Edges of a band that int32 cannot hold are cut to ``BAND_MIN`` and ``BAND_MAX``, which no
    sequence reaches.
    """
    table = np.stack(np.broadcast_arrays(*columns), axis=1)
    return table.clip(BAND_MIN, BAND_MAX).astype(np.int32)


def _ranges(ranges: npt.ArrayLike, name: str) -> IntArray:
    array = int_array(ranges, name)
    if array.size == 0:
        array = array.reshape(0, 2)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(
            f"{name} must have shape [num_slices, 2], got {list(array.shape)}; "
            f"pass one [start, end) pair per slice"
        )
    pairs = _to_int32(array, name)
    for row in np.flatnonzero((pairs[:, 0] < 0) | (pairs[:, 1] < pairs[:, 0]))[:1]:
        raise ValueError(
            f"{name} must hold ranges with 0 <= start <= end, got {pairs[row].tolist()} in row "
            f"{row}; ranges are half-open [start, end)"
        )
    return pairs


def _type_codes(attn_type_map: npt.ArrayLike | None, num_slices: int) -> IntArray:
    if attn_type_map is None:
        return np.zeros(num_slices, dtype=np.int32)
    types = int_array(attn_type_map, "attn_type_map")
    if types.shape != (num_slices,):
        raise ValueError(
            f"attn_type_map must have one code per slice ([{num_slices}]), got shape "
            f"{list(types.shape)}; pass None for all FULL"
        )
    codes = _to_int32(types, "attn_type_map")
    for row in np.flatnonzero((codes < 0) | (codes > 3))[:1]:
        raise ValueError(
            f"attn_type_map must hold codes 0 (FULL), 1 (CAUSAL), 2 (INV_CAUSAL), 3 (BI_CAUSAL), "
            f"got {codes[row]} in row {row}; use one of them"
        )
    return codes


def _to_int32(wide: npt.NDArray[np.int64], name: str) -> IntArray:
    if wide.size and (wide.min() < BAND_MIN or wide.max() > BAND_MAX):
        raise ValueError(
            f"{name} must fit in int32, got values from {wide.min()} to {wide.max()}; "
            f"sequences of 2^31 tokens and more are not supported"
        )
    return wide.astype(np.int32)
