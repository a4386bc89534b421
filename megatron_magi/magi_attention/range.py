"""AttnRange: a half-open range of tokens, as MagiAttention writes masks down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_magi.checks import flag, instance, integer, optional_integer, pair

NaiveRange = tuple[int, int]


class RangeError(ValueError):
    """A range that ends before it starts."""


@dataclass(order=True, unsafe_hash=True, slots=True)
class AttnRange:
    """Half-open ``[start, end)`` in tokens; empty allowed. Both ends may be set, one at a time.

    Equal ranges have equal hashes, so leave a range alone while it is a key of a dictionary.

    Raises:
        TypeError: an end that is no integer.
        RangeError: end before start.
        ValueError: an end that does not fit in 64 bits.
    """

    start: int
    end: int

    def __setattr__(self, name: str, value: int) -> None:
        value = integer(value, f"AttnRange.{name}", -(2**63), 2**63 - 1)
        start = value if name == "start" else getattr(self, "start", value)
        end = value if name == "end" else getattr(self, "end", value)
        if end < start:
            raise RangeError(
                f"a range must have start <= end, got [{start}, {end}); swap them, or set the "
                f"other end first"
            )
        object.__setattr__(self, name, value)

    @staticmethod
    def from_range(attn_range: AttnRange | Sequence[int], check: bool = False) -> AttnRange:
        """A new range, from a pair or another range; always checked."""
        flag(check, "check")
        return AttnRange(*pair(attn_range, "a range", "(start, end)"))

    @property
    def seqlen(self) -> int:
        """Tokens in the range."""
        return self.end - self.start

    def to_naive_range(self) -> NaiveRange:
        """(start, end)."""
        return (self.start, self.end)

    def is_empty(self) -> bool:
        return self.start == self.end

    def is_valid_close(self, start: int | None = None, end: int | None = None) -> bool:
        """Whether start <= end; None stands for this range's own, which always are."""
        start, end = self._ends(start, end)
        return start <= end

    def is_valid_open(self, start: int | None = None, end: int | None = None) -> bool:
        """Whether start < end; None stands for this range's own."""
        start, end = self._ends(start, end)
        return start < end

    def check_valid(self, start: int | None = None, end: int | None = None) -> None:
        """Raise RangeError where `is_valid_close` is False."""
        AttnRange(*self._ends(start, end))

    def clone(self) -> AttnRange:
        """A range of its own with the same ends."""
        return AttnRange(self.start, self.end)

    def offset(self, offset: int) -> AttnRange:
        """The range moved by ``offset`` tokens."""
        offset = integer(offset, "offset")
        return AttnRange(self.start + offset, self.end + offset)

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRange:
        """The part inside ``[start, end)``; empty at its start if there is none."""
        start, end = self._ends(start, end)
        low = max(self.start, start)
        return AttnRange(low, max(low, min(self.end, end)))

    def intersect(self, other: AttnRange) -> AttnRange:
        """The common part, empty if there is none."""
        check_range(other, "other")
        return self.truncate(other.start, other.end)

    def intersect_size(self, other: AttnRange) -> int:
        """Tokens of both."""
        return self.intersect(other).seqlen

    def union(self, other: AttnRange) -> list[AttnRange]:
        """The tokens of either: one range where the two share a token or one holds the other, and
        both of them otherwise, also where they touch or one is empty."""
        check_range(other, "other")
        if self.is_empty() or other.is_empty() or not self.is_overlap_with(other):
            return [self.clone(), other.clone()]
        return [AttnRange(min(self.start, other.start), max(self.end, other.end))]

    def union_size(self, other: AttnRange) -> int:
        """Tokens of either, each counted once."""
        return sum(r.seqlen for r in self.union(other))

    def diff_by(self, other: AttnRange) -> list[AttnRange]:
        """The tokens of ``other`` that are not in this range: no, one or two ranges."""
        check_range(other, "other")
        sides = other.truncate(end=self.start), other.truncate(start=self.end)
        return [side for side in sides if not side.is_empty()]

    def is_subrange_of(self, other: AttnRange) -> bool:
        check_range(other, "other")
        return other.start <= self.start and self.end <= other.end

    def is_overlap_with(self, other: AttnRange) -> bool:
        """Whether each begins before the other ends."""
        check_range(other, "other")
        return self.start < other.end and other.start < self.end

    def _ends(self, start: int | None, end: int | None) -> NaiveRange:
        """The given ends, and this range's own where none is given."""
        start, end = optional_integer(start, "start"), optional_integer(end, "end")
        return self.start if start is None else start, self.end if end is None else end

    def __len__(self) -> int:
        return self.seqlen

    def __iter__(self) -> Iterator[int]:
        return iter((self.start, self.end))

    def __repr__(self) -> str:
        return f"[{self.start}, {self.end})"


def check_range(value: object, name: str) -> None:
    """Refuse what is no AttnRange."""
    instance(value, AttnRange, name, "pass AttnRange(start, end)")
