"""AttnRange and AttnRanges: half-open token ranges, as the field writes masks down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

NaiveRange = tuple[int, int]


class RangeError(ValueError):
    """A range that ends before it starts."""


@dataclass(frozen=True, order=True)
class AttnRange:
    """Half-open ``[start, end)`` in tokens; empty allowed.

    Raises:
        RangeError: end before start.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise RangeError(
                f"a range must have start <= end, got [{self.start}, {self.end}); swap them"
            )

    @staticmethod
    def from_range(attn_range: AttnRange | Sequence[int], check: bool = False) -> AttnRange:
        """From a pair or another range; always checked."""
        start, end = attn_range
        return AttnRange(int(start), int(end))

    @property
    def seqlen(self) -> int:
        """Tokens in the range."""
        return self.end - self.start

    def to_naive_range(self) -> NaiveRange:
        """(start, end)."""
        return (self.start, self.end)

    def is_empty(self) -> bool:
        return self.start == self.end

    def clone(self) -> AttnRange:
        """Itself: ranges are immutable."""
        return self

    def offset(self, offset: int) -> AttnRange:
        """The range moved by ``offset`` tokens."""
        return AttnRange(self.start + offset, self.end + offset)

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRange:
        """The part inside ``[start, end)``; empty at its start if there is none."""
        low = self.start if start is None else max(self.start, start)
        high = self.end if end is None else min(self.end, end)
        return AttnRange(low, max(low, high))

    def intersect(self, other: AttnRange) -> AttnRange:
        """The common part, empty if there is none."""
        return self.truncate(other.start, other.end)

    def intersect_size(self, other: AttnRange) -> int:
        return self.intersect(other).seqlen

    def is_subrange_of(self, other: AttnRange) -> bool:
        return other.start <= self.start and self.end <= other.end

    def is_overlap_with(self, other: AttnRange) -> bool:
        return self.start < other.end and other.start < self.end

    def __len__(self) -> int:
        return self.seqlen

    def __iter__(self) -> Iterator[int]:
        return iter((self.start, self.end))

    def __repr__(self) -> str:
        return f"[{self.start}, {self.end})"


class AttnRanges:
    """A list of ranges; row i of ``q_ranges`` and ``k_ranges`` is slice i of a mask."""

    def __init__(self) -> None:
        self._ranges: list[AttnRange] = []

    @staticmethod
    def from_ranges(
        ranges: AttnRanges | Iterable[AttnRange | Sequence[int]], check: bool = False
    ) -> AttnRanges:
        """From pairs or ranges; always checked."""
        made = AttnRanges()
        made._ranges = [AttnRange.from_range(r) for r in ranges]
        return made

    @staticmethod
    def from_cu_seqlens(cu_seqlens: Sequence[int], seq_len: int) -> AttnRanges:
        """One range per document of the prefix sums.

        Raises:
            ValueError: sums that do not start at 0, decrease, or do not end at ``seq_len``.
        """
        made = AttnRanges.from_ranges(pairwise(cu_seqlens))
        if list(cu_seqlens[:1]) != [0] or cu_seqlens[-1] != seq_len:
            raise ValueError(
                f"cu_seqlens must start at 0 and end at seq_len {seq_len}, got "
                f"{list(cu_seqlens)}; pass prefix sums of all documents"
            )
        return made

    def append(self, attn_range: AttnRange, check: bool = False) -> None:
        self._ranges.append(AttnRange.from_range(attn_range))

    def insert(self, idx: int, attn_range: AttnRange, check: bool = False) -> None:
        self._ranges.insert(idx, AttnRange.from_range(attn_range))

    def extend(self, attn_ranges: AttnRanges, check: bool = False) -> None:
        self._ranges.extend(attn_ranges)

    def pop(self, idx: int = -1) -> AttnRange:
        return self._ranges.pop(idx)

    def clone(self) -> AttnRanges:
        return AttnRanges.from_ranges(self)

    def sort(self) -> AttnRanges:
        """The ranges by start; equal starts keep their order."""
        made = AttnRanges()
        made._ranges = sorted(self._ranges, key=lambda r: r.start)
        return made

    def merge(self) -> AttnRanges:
        """The union, as ascending ranges that do not touch."""
        merged: list[AttnRange] = []
        for r in self.sort()._ranges:
            if merged and r.start <= merged[-1].end:
                merged[-1] = AttnRange(merged[-1].start, max(merged[-1].end, r.end))
            else:
                merged.append(r)
        return AttnRanges.from_ranges(merged)

    def is_empty(self) -> bool:
        """No range in the list."""
        return not self._ranges

    def is_sorted(self) -> bool:
        return all(a.start <= b.start for a, b in pairwise(self))

    def is_merged(self) -> bool:
        """Ascending, none touching the next."""
        return self.is_sorted() and all(a.end < b.start for a, b in pairwise(self))

    def is_non_overlap(self) -> bool:
        return self.total_seqlen == self.merge().total_seqlen

    def is_cu_seqlens(self, seqlen: int) -> bool:
        """Whether the ranges are documents that cover ``[0, seqlen)`` one after another."""
        ends = [0, *(r.end for r in self)]
        return [r.start for r in self] == ends[:-1] and ends[-1] == seqlen

    def to_cu_seqlens(self, seq_len: int) -> list[int]:
        """Prefix sums of the documents.

        Raises:
            ValueError: ranges with gaps or overlaps.
        """
        if not self.is_cu_seqlens(seq_len):
            raise ValueError(
                f"cu_seqlens need ranges that cover [0, {seq_len}) one after another, got {self}; "
                f"use the ranges themselves"
            )
        return [0, *(r.end for r in self)]

    def to_naive_ranges(self) -> list[NaiveRange]:
        """[(start, end), ...]."""
        return [r.to_naive_range() for r in self]

    def to_tensor(self, device: str | torch.device = "cpu") -> Tensor:
        """int32 [N, 2], for ``flex_flash_attn_func``."""
        return torch.tensor(self.to_naive_ranges(), dtype=torch.int32, device=device).view(-1, 2)

    @property
    def total_seqlen(self) -> int:
        """Tokens of all ranges, counted once per range."""
        return sum(r.seqlen for r in self)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest range, 0 without one."""
        return max((r.seqlen for r in self), default=0)

    @property
    def start(self) -> int:
        """The lowest start, 0 without a range."""
        return min((r.start for r in self), default=0)

    @property
    def end(self) -> int:
        """The highest end, 0 without a range."""
        return max((r.end for r in self), default=0)

    @property
    def size(self) -> int:
        """Number of ranges."""
        return len(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[AttnRange]:
        return iter(self._ranges)

    def __getitem__(self, idx: int | slice) -> AttnRange | AttnRanges:
        if isinstance(idx, slice):
            return AttnRanges.from_ranges(self._ranges[idx])
        return self._ranges[idx]

    def __eq__(self, other: object) -> bool:
        return self._ranges == other._ranges if isinstance(other, AttnRanges) else NotImplemented

    def __repr__(self) -> str:
        return f"AttnRanges({self._ranges})"
