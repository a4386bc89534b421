"""AttnRanges: a list of token ranges, and what such lists are asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_magi.checks import flag, instance, integer, integers, shown
from megatron_magi.core.mask.row_ranges import joined, without
from megatron_magi.core.tensor_checks import device as checked_device
from megatron_magi.magi_attention.range import AttnRange, NaiveRange

Rows = npt.NDArray[np.int64]


class AttnRanges:
    """A list of ranges; row i of ``q_ranges`` and ``k_ranges`` is slice i of a mask.

    It keeps the ranges it is given, as a list does; what gives new ranges copies them. Equal lists
    have equal hashes, so leave one alone while it is a key of a dictionary.
    """

    def __init__(self) -> None:
        self._ranges: list[AttnRange] = []

    def append(self, attn_range: AttnRange, check: bool = False) -> None:
        flag(check, "check")
        self._ranges.append(_held(attn_range))

    def insert(self, idx: int, attn_range: AttnRange, check: bool = False) -> None:
        flag(check, "check")
        self._ranges.insert(integer(idx, "idx"), _held(attn_range))

    def extend(self, attn_ranges: AttnRanges, check: bool = False) -> None:
        flag(check, "check")
        check_ranges(attn_ranges, "attn_ranges")
        self._ranges.extend(attn_ranges._ranges)

    def pop(self, idx: int = -1) -> AttnRange:
        """Take out the range at ``idx``, the last by default."""
        return self._ranges.pop(self._place(idx))

    def is_empty(self) -> bool:
        """No range in the list."""
        return not self._ranges

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
        """The lowest start; a ValueError where there is no range."""
        return min(r.start for r in self._some())

    @property
    def end(self) -> int:
        """The highest end; a ValueError where there is no range."""
        return max(r.end for r in self._some())

    @property
    def size(self) -> int:
        """Number of ranges."""
        return len(self._ranges)

    @property
    def points(self) -> list[int]:
        """All starts and ends, ascending, each once."""
        return sorted({point for r in self for point in r})

    @staticmethod
    def from_ranges(
        ranges: AttnRanges | Iterable[AttnRange | Sequence[int]], check: bool = False
    ) -> AttnRanges:
        """From pairs or ranges, which are copied; always checked."""
        is_scalar = getattr(ranges, "ndim", None) == 0
        if is_scalar or not isinstance(ranges, Iterable) or isinstance(ranges, (str, AttnRange)):
            raise TypeError(
                f"ranges must be a list of (start, end) pairs, got {shown(ranges)}; "
                f"pass [[start, end], ...]"
            )
        flag(check, "check")
        made = AttnRanges()
        made._ranges = [AttnRange.from_range(r) for r in ranges]
        return made

    @staticmethod
    def from_cu_seqlens(cu_seqlens: Sequence[int], seq_len: int) -> AttnRanges:
        """One range per document of the prefix sums.

        Raises:
            ValueError: sums that do not start at 0, decrease, or do not end at ``seq_len``.
        """
        sums, seq_len = integers(cu_seqlens, "cu_seqlens"), integer(seq_len, "seq_len")
        if sums[:1] != [0] or sums[-1] != seq_len:
            raise ValueError(
                f"cu_seqlens must start at 0 and end at seq_len {seq_len}, got "
                f"{shown(sums)}; pass prefix sums of all documents"
            )
        return AttnRanges.from_ranges(pairwise(sums))

    def is_valid(self) -> bool:
        """Always: a range that ends before it starts cannot be made."""
        return True

    def check_valid(self) -> None:
        """Nothing to raise; see `is_valid`."""

    def clone(self) -> AttnRanges:
        """The same ranges, copied."""
        return AttnRanges.from_ranges(self)

    def clear_empty(self) -> AttnRanges:
        """The ranges that hold tokens."""
        return AttnRanges.from_ranges(r for r in self if not r.is_empty())

    def sort(self) -> AttnRanges:
        """The ranges by start; equal starts keep their order."""
        ordered = sorted(self, key=lambda r: r.start)
        return AttnRanges.from_ranges(ordered)

    def merge(self) -> AttnRanges:
        """The union, as ascending ranges that do not touch."""
        return _of_rows(_union(self))

    def merge_with_split_alignment(self, split_alignment: int = 1) -> AttnRanges:
        """The union of the ranges widened to multiples of ``split_alignment``."""
        unit = integer(split_alignment, "split_alignment", 1)
        wide = ((r.start // unit * unit, -(-r.end // unit) * unit) for r in self)
        return AttnRanges.from_ranges(wide).merge()

    def chunk(self, chunk_size: int, check: bool = True) -> list[AttnRanges]:
        """The tokens in their order, cut every ``chunk_size`` tokens; the last piece is the rest.

        Raises:
            ValueError: ranges that share tokens, unless ``check`` is False.
        """
        size = integer(chunk_size, "chunk_size", 1)
        if flag(check, "check") and not self.is_non_overlap():
            raise ValueError(
                f"ranges must not share tokens when they are cut in chunks, got {shown(self)}; "
                f"merge() them first, or pass check=False"
            )
        pieces: dict[int, AttnRanges] = defaultdict(AttnRanges)
        at = 0
        for r in self.clear_empty():
            for number in range(at // size, -(-(at + r.seqlen) // size)):
                start = r.start + number * size - at
                pieces[number].append(r.truncate(start, start + size))
            at += r.seqlen
        return list(pieces.values())

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRanges:
        """The part of each range inside ``[start, end)``, without the empty ones."""
        return AttnRanges.from_ranges(r.truncate(start, end) for r in self).clear_empty()

    def make_range_local(
        self,
        other_attn_range: AttnRange,
        is_self_merged: bool = False,
        prefix_offset: list[int] | None = None,
    ) -> tuple[AttnRange, AttnRange]:
        """Where a range lies when the tokens of these ranges are laid end to end, in order.

        Args:
            other_attn_range: inside one of the merged ranges.
            is_self_merged: without effect; the list looks itself.
            prefix_offset: where each merged range begins there; None: counted.

        Returns:
            The place, and the merged range that holds the given one.

        Raises:
            ValueError: a range that reaches beyond, or other than one offset per merged range.
        """
        flag(is_self_merged, "is_self_merged")
        union = self.merge()
        places = union._places() if prefix_offset is None else prefix_offset
        places = integers(places, "prefix_offset")
        if len(places) != len(union):
            raise ValueError(
                f"prefix_offset must have one place per merged range ({len(union)}), got "
                f"{len(places)}; leave it out"
            )
        return union._located(AttnRange.from_range(other_attn_range), places)

    def make_ranges_local(
        self, other_attn_ranges: AttnRanges, is_self_merged: bool = False
    ) -> AttnRanges:
        """`make_range_local` of each range: the places alone."""
        check_ranges(other_attn_ranges, "other_attn_ranges")
        flag(is_self_merged, "is_self_merged")
        union = self.merge()
        places = union._places()
        located = (union._located(other, places)[0] for other in other_attn_ranges)
        return AttnRanges.from_ranges(located)

    def find_hole_ranges(
        self,
        other_attn_ranges: AttnRanges,
        is_self_merged: bool = False,
        is_other_merged: bool = False,
    ) -> AttnRanges:
        """The tokens of these ranges that are not in the others, merged."""
        own, others = _two_unions(self, other_attn_ranges, is_self_merged, is_other_merged)
        return _of_rows(without(own, others))

    def find_overlap_ranges(
        self,
        other_attn_ranges: AttnRanges,
        is_self_merged: bool = False,
        is_other_merged: bool = False,
    ) -> AttnRanges:
        """The tokens of both, ascending; merged."""
        own, others = _two_unions(self, other_attn_ranges, is_self_merged, is_other_merged)
        return _of_rows(without(own, without(own, others)))

    def intersect_size(self) -> int:
        """Tokens that these ranges hold more than once, counted once for each time after the
        first."""
        return self.total_seqlen - self.merge().total_seqlen

    def intersect_size_with(self, other: AttnRanges) -> int:
        """Tokens that both lists hold, each counted once for every range of either list that holds
        it, less one; without overlaps inside a list, simply the tokens of both."""
        shared = self.find_overlap_ranges(other)
        held = (r.intersect_size(s) for r in (*self, *other) for s in shared)
        return sum(held) - shared.total_seqlen

    def union_size(self) -> int:
        """`total_seqlen`: a token counts once for every range that holds it."""
        return self.total_seqlen

    def union_size_with(self, other: AttnRanges) -> int:
        """`total_seqlen` of both lists together."""
        check_ranges(other, "other")
        return self.total_seqlen + other.total_seqlen

    def is_sorted(self) -> bool:
        return all(a.start <= b.start for a, b in pairwise(self))

    def is_merged(self) -> bool:
        """Ascending, none touching the next."""
        return all(a.end < b.start for a, b in pairwise(self))

    def is_non_overlap(self) -> bool:
        return self.intersect_size() == 0

    def is_cu_seqlens(self, seqlen: int) -> bool:
        """Whether the ranges are documents that cover ``[0, seqlen)`` one after another."""
        ends = [0, *(r.end for r in self)]
        return [r.start for r in self] == ends[:-1] and ends[-1] == integer(seqlen, "seqlen")

    def to_cu_seqlens(self, seq_len: int) -> list[int]:
        """Prefix sums of the documents.

        Raises:
            ValueError: ranges with gaps or overlaps.
        """
        if not self.is_cu_seqlens(integer(seq_len, "seq_len")):
            raise ValueError(
                f"cu_seqlens need ranges that cover [0, {seq_len}) one after another, got "
                f"{shown(self)}; use the ranges themselves"
            )
        return [0, *(r.end for r in self)]

    def to_naive_ranges(self) -> list[NaiveRange]:
        """[(start, end), ...]."""
        return [r.to_naive_range() for r in self]

    def to_tensor(self, device: str | torch.device = "cpu") -> Tensor:
        """int32 [N, 2], for ``flex_flash_attn_func``."""
        place = checked_device(device)
        return torch.tensor(self.to_naive_ranges(), dtype=torch.int32, device=place).view(-1, 2)

    def _places(self) -> list[int]:
        """Where each range begins when all are laid end to end."""
        return [0, *accumulate(r.seqlen for r in self)][: len(self)]

    def _located(self, other: AttnRange, places: list[int]) -> tuple[AttnRange, AttnRange]:
        """Where ``other`` lies when these merged ranges are laid at ``places``, and its holder."""
        at = bisect_right(self._ranges, other.start, key=lambda r: r.start) - 1
        if at < 0 or not other.is_subrange_of(self[at]):
            raise ValueError(
                f"a range must lie inside one of the merged ranges to have a place among them, got "
                f"{other}; cut it with find_overlap_ranges first"
            )
        return other.offset(places[at] - self[at].start), self[at]

    def _some(self) -> list[AttnRange]:
        if not self._ranges:
            raise ValueError(
                "start and end need a range, got a list without one; look at is_empty() first"
            )
        return self._ranges

    def _place(self, idx: int) -> int:
        at = integer(idx, "idx")
        if not -len(self) <= at < len(self):
            raise IndexError(
                f"idx must name one of {len(self)} ranges, got {at}; look at size first"
            )
        return at

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[AttnRange]:
        return iter(self._ranges)

    @overload
    def __getitem__(self, idx: int) -> AttnRange: ...

    @overload
    def __getitem__(self, idx: slice) -> AttnRanges: ...

    def __getitem__(self, idx: int | slice) -> AttnRange | AttnRanges:
        if isinstance(idx, slice):
            made = AttnRanges()
            made._ranges = self._ranges[idx]
            return made
        return self._ranges[self._place(idx)]

    def __setitem__(self, idx: int | slice, value: AttnRange | AttnRanges) -> None:
        """Put a range in the place of one, or as many in the places of a slice."""
        if not isinstance(idx, slice):
            self._ranges[self._place(idx)] = _held(value)
            return
        check_ranges(value, "the ranges of a slice")
        assert isinstance(value, AttnRanges)
        if len(self._ranges[idx]) != len(value):
            raise ValueError(
                f"a slice of {len(self._ranges[idx])} ranges must get as many, got {len(value)}; "
                f"use insert and pop to change their number"
            )
        self._ranges[idx] = list(value)

    def __eq__(self, other: object) -> bool:
        return self._ranges == other._ranges if isinstance(other, AttnRanges) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._ranges))

    def __repr__(self) -> str:
        return f"AttnRanges({self._ranges})"


def _held(value: object) -> AttnRange:
    """The range itself, which the list then holds, or a new one of a pair."""
    return value if isinstance(value, AttnRange) else AttnRange.from_range(value)  # type: ignore[arg-type]


def check_ranges(value: object, name: str) -> None:
    """Refuse what is no AttnRanges."""
    instance(value, AttnRanges, name, "pass AttnRanges.from_ranges([[start, end], ...])")


def _two_unions(
    own: AttnRanges, other: AttnRanges, is_self_merged: bool, is_other_merged: bool
) -> tuple[Rows, Rows]:
    """Both unions without empty ranges. Who says that a list is merged is not believed."""
    check_ranges(other, "other_attn_ranges")
    flag(is_self_merged, "is_self_merged")
    flag(is_other_merged, "is_other_merged")
    return _union(own.clear_empty()), _union(other.clear_empty())


def _union(ranges: AttnRanges) -> Rows:
    return joined(np.array(ranges.to_naive_ranges(), np.int64).reshape(-1, 2))


def _of_rows(rows: Rows) -> AttnRanges:
    return AttnRanges.from_ranges(rows.tolist())
