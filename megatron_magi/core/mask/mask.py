"""AttnMask: the set of visible (query, key) cells of one packed sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_magi.checks import instance, integer
from megatron_magi.core.mask.slices import BAND_MAX, IntArray, as_slices
from megatron_magi.core.native import solver

MAX_DENSE_CELLS = 2**28
"""``to_dense`` refuses more cells than this (256 MiB of bools)."""


@dataclass(frozen=True, eq=False)
class AttnMask:
    """Slices over ``total_seqlen_q`` queries and ``total_seqlen_k`` keys.

    Slices may overlap in their q ranges and in their k ranges, but never share a cell. They are
    brought into canonical form (tight rectangles, finite bands, sorted, none empty), so that
    equivalent slices have equal digests. A row that no slice covers sees nothing: its out is 0 and
    its lse is -inf.

    Raises:
        ValueError: ranges out of bounds or reversed, or two slices that share a cell.
    """

    slices: IntArray = field(repr=False)
    """int32 [N, 6], read-only: q_start, q_end, k_start, k_end, d_lo, d_hi."""
    total_seqlen_q: int
    total_seqlen_k: int

    def __post_init__(self) -> None:
        slices = as_slices(self.slices)
        for name in ("total_seqlen_q", "total_seqlen_k"):
            object.__setattr__(self, name, _length(getattr(self, name), name))
        _check_bounds(slices, self.total_seqlen_q, self.total_seqlen_k)
        _check_disjoint(slices)
        canonical = solver.canonical_slices(slices)
        canonical = canonical[np.lexsort(canonical.T[::-1])]
        canonical.setflags(write=False)
        object.__setattr__(self, "slices", canonical)

    @property
    def num_slices(self) -> int:
        return len(self.slices)

    def area(self) -> int:
        """Number of visible cells, the unit of attention work."""
        return int(solver.slice_areas(self.slices).sum())

    @cached_property
    def digest(self) -> int:
        """64-bit hash of the canonical slices and both lengths."""
        lengths = np.array([self.total_seqlen_q, self.total_seqlen_k], dtype=np.int64)
        return int(solver.hash64(lengths.tobytes() + self.slices.tobytes()))

    def to_dense(self) -> npt.NDArray[np.bool_]:
        """bool [total_seqlen_q, total_seqlen_k]; for tests and pictures of small masks.

        Raises:
            ValueError: above 2^28 cells.
        """
        if self.total_seqlen_q * self.total_seqlen_k > MAX_DENSE_CELLS:
            raise ValueError(
                f"to_dense makes at most {MAX_DENSE_CELLS} cells, got {self.total_seqlen_q} x "
                f"{self.total_seqlen_k}; use the slices, or draw_mask for a picture"
            )
        return dense_from_slices(self.slices, self.total_seqlen_q, self.total_seqlen_k)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttnMask):
            return NotImplemented
        return (
            self.total_seqlen_q == other.total_seqlen_q
            and self.total_seqlen_k == other.total_seqlen_k
            and np.array_equal(self.slices, other.slices)
        )

    def __hash__(self) -> int:
        return self.digest

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.slices.setflags(write=False)  # pickling and deepcopy lose this flag


MaskOfLayers = AttnMask | tuple[AttnMask, AttnMask]
"""One mask for all layers, or two: of the layers without a window, and of the window layers."""


def dense_from_slices(slices: IntArray, num_q: int, num_k: int) -> npt.NDArray[np.bool_]:
    """bool [num_q, num_k] with the slices' cells set."""
    dense = np.zeros((num_q, num_k), dtype=np.bool_)
    for q0, q1, k0, k1, d_lo, d_hi in slices.tolist():
        diagonal = np.arange(k0, k1)[None, :] - np.arange(q0, q1)[:, None]
        dense[q0:q1, k0:k1] |= (diagonal >= d_lo) & (diagonal <= d_hi)
    return dense


def _length(value: int, name: str) -> int:
    value = integer(value, name)
    if not 0 <= value <= BAND_MAX // 2:
        raise ValueError(
            f"{name} must be between 0 and {BAND_MAX // 2} tokens, got {value}; "
            f"shorten it, for diagonals k - q must fit in int32"
        )
    return value


def _check_bounds(slices: IntArray, total_seqlen_q: int, total_seqlen_k: int) -> None:
    for name, start, end, total in (
        ("q", slices[:, 0], slices[:, 1], total_seqlen_q),
        ("k", slices[:, 2], slices[:, 3], total_seqlen_k),
    ):
        for row in np.flatnonzero((start < 0) | (end < start) | (end > total))[:1]:
            raise ValueError(
                f"slice {row} must have 0 <= {name}_start <= {name}_end <= total_seqlen_{name} = "
                f"{total}, got [{start[row]}, {end[row]}); cut the slice or raise the total"
            )


def _check_disjoint(slices: IntArray) -> None:
    pair = solver.find_overlap(slices)
    if pair is not None:
        first, second = pair
        raise ValueError(
            f"slices must not share a cell, got slices {first} {slices[first].tolist()} and "
            f"{second} {slices[second].tolist()}; shared cells would be counted twice, so cut one"
        )


def check_mask(value: object) -> None:
    """Refuse a value that is no AttnMask; every function that takes a mask calls this."""
    instance(value, AttnMask, "mask", "build one with megatron_magi.masks")
