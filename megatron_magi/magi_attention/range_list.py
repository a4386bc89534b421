"""RangeList: ranges in a row, put in and taken out as in a list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar, overload

from megatron_magi.checks import flag, integer, shown
from megatron_magi.magi_attention.range import AttnRange

List = TypeVar("List", bound="RangeList")


class RangeList:
    """What `AttnRanges` has in common with a list."""

    def __init__(self) -> None:
        self._ranges: list[AttnRange] = []

    def append(self, attn_range: AttnRange, check: bool = False) -> None:
        flag(check, "check")
        self._ranges.append(_range(attn_range))

    def insert(self, idx: int, attn_range: AttnRange, check: bool = False) -> None:
        flag(check, "check")
        self._ranges.insert(integer(idx, "idx"), _range(attn_range))

    def extend(self, attn_ranges: RangeList, check: bool = False) -> None:
        flag(check, "check")
        _check_list(attn_ranges, "attn_ranges")
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
        """The lowest start.

        Raises:
            ValueError: an empty list.
        """
        self._check_start_and_end()
        return min(r.start for r in self)

    @property
    def end(self) -> int:
        """The highest end.

        Raises:
            ValueError: an empty list.
        """
        self._check_start_and_end()
        return max(r.end for r in self)

    @property
    def size(self) -> int:
        """Number of ranges."""
        return len(self._ranges)

    @property
    def points(self) -> list[int]:
        """All starts and ends, ascending, each once."""
        return sorted({point for r in self for point in r})

    def _check_start_and_end(self) -> None:
        if not self._ranges:
            raise ValueError(
                "start and end need a range, got a list without one; look at is_empty() first"
            )

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
    def __getitem__(self: List, idx: slice) -> List: ...

    def __getitem__(self: List, idx: int | slice) -> AttnRange | List:
        if isinstance(idx, slice):
            made = type(self)()
            made._ranges = self._ranges[idx]
            return made
        return self._ranges[self._place(idx)]

    def __setitem__(self, idx: int | slice, value: AttnRange | RangeList) -> None:
        """Put a range in the place of one, or as many in the places of a slice."""
        if not isinstance(idx, slice):
            self._ranges[self._place(idx)] = _range(value)
            return
        _check_list(value, "the ranges of a slice")
        assert isinstance(value, RangeList)
        if len(self._ranges[idx]) != len(value):
            raise ValueError(
                f"a slice of {len(self._ranges[idx])} ranges must get as many, got {len(value)}; "
                f"use insert and pop to change their number"
            )
        self._ranges[idx] = list(value)

    def __eq__(self, other: object) -> bool:
        return self._ranges == other._ranges if isinstance(other, RangeList) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._ranges))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._ranges})"


def _range(value: object) -> AttnRange:
    """The range itself, which the list then holds, or a new one of a pair."""
    return value if isinstance(value, AttnRange) else AttnRange.from_range(value)  # type: ignore[arg-type]


def _check_list(value: object, name: str) -> None:
    if not isinstance(value, RangeList):  # the error names the class that a caller knows
        raise TypeError(
            f"{name} must be an AttnRanges, got {shown(value)}; "
            f"pass AttnRanges.from_ranges([[start, end], ...])"
        )
