"""AttnRange: a half-open range of tokens, as MagiAttention writes masks down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_magi.checks import flag, integer, pair

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

    def clone(self) -> AttnRange:
        """A range of its own with the same ends."""
        return AttnRange(self.start, self.end)

    def __len__(self) -> int:
        return self.seqlen

    def __iter__(self) -> Iterator[int]:
        return iter((self.start, self.end))

    def __repr__(self) -> str:
        return f"[{self.start}, {self.end})"
