"""AttnRanges: a list of token ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import SupportsIndex, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from megatron_magi.checks import flag, instance, integer, integers, shown
from megatron_magi.core.mask.row_ranges import joined
from megatron_magi.core.tensor_checks import device as checked_device
from megatron_magi.magi_attention.range import AttnRange, NaiveRange

T = TypeVar("T")


class AttnRanges(list[AttnRange]):
    """A list of ranges; row i of ``q_ranges`` and ``k_ranges`` is slice i of a mask.

    As in any list, an appended range is kept and not copied. Equal lists have equal hashes, so
    leave one alone while it is a key of a dictionary. Pairs are taken for ranges.
    """

    def __init__(self) -> None:
        super().__init__()

    @staticmethod
    def from_ranges(
        ranges: AttnRanges | Iterable[AttnRange | Sequence[int]], check: bool = False
    ) -> AttnRanges:
        """From pairs or ranges, which are copied; always checked."""
        made = AttnRanges()
        made.extend(map(AttnRange.from_range, _listed(ranges)), check)
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

    def append(self, attn_range: AttnRange, check: bool = False) -> None:
        """Add a range at the end."""
        flag(check, "check")
        super().append(_range(attn_range))

    def insert(self, idx: SupportsIndex, attn_range: AttnRange, check: bool = False) -> None:
        """Add a range before ``idx``."""
        flag(check, "check")
        super().insert(integer(idx, "idx"), _range(attn_range))

    def extend(self, attn_ranges: Iterable[AttnRange], check: bool = False) -> None:
        """Add ranges at the end."""
        flag(check, "check")
        super().extend(list(map(_range, _listed(attn_ranges))))

    def is_empty(self) -> bool:
        """Returns True if the list has no range."""
        return not self

    @property
    def size(self) -> int:
        """Number of ranges."""
        return len(self)

    @property
    def start(self) -> int:
        """The lowest start; a ValueError where there is no range."""
        return min(r.start for r in self)

    @property
    def end(self) -> int:
        """The highest end; a ValueError where there is no range."""
        return max(r.end for r in self)

    @property
    def total_seqlen(self) -> int:
        """Tokens of all ranges, counted once per range."""
        return sum(r.seqlen for r in self)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest range, 0 without one."""
        return max((r.seqlen for r in self), default=0)

    def clone(self) -> AttnRanges:
        """The same ranges, copied."""
        return AttnRanges.from_ranges(self)

    def sort(self) -> AttnRanges:  # type: ignore[override]  # published so; a list's sorts itself
        """A new list, by start; equal starts keep their order."""
        ordered: list[AttnRange] = sorted(self, key=lambda r: r.start)
        return AttnRanges.from_ranges(ordered)

    def merge(self) -> AttnRanges:
        """The union, as ascending ranges that do not touch."""
        rows = np.array(self.to_naive_ranges(), np.int64).reshape(-1, 2)
        return AttnRanges.from_ranges(joined(rows).tolist())

    def to_cu_seqlens(self, seq_len: int) -> list[int]:
        """Prefix sums of the documents.

        Raises:
            ValueError: ranges with gaps or overlaps.
        """
        ends = [0, *(r.end for r in self)]
        if [r.start for r in self] != ends[:-1] or ends[-1] != integer(seq_len, "seq_len"):
            raise ValueError(
                f"cu_seqlens need ranges that cover [0, {seq_len}) one after another, got "
                f"{shown(self)}; use the ranges themselves"
            )
        return ends

    def to_naive_ranges(self) -> list[NaiveRange]:
        """[(start, end), ...]."""
        return [r.to_naive_range() for r in self]

    def to_tensor(self, device: str | torch.device = "cpu") -> Tensor:
        """int32 [N, 2], for ``flex_flash_attn_func``."""
        place = checked_device(device)
        return torch.tensor(self.to_naive_ranges(), dtype=torch.int32, device=place).view(-1, 2)

    @overload
    def __getitem__(self, idx: SupportsIndex) -> AttnRange: ...

    @overload
    def __getitem__(self, idx: slice) -> AttnRanges: ...

    def __getitem__(self, idx: SupportsIndex | slice) -> AttnRange | AttnRanges:
        if not isinstance(idx, slice):
            return super().__getitem__(integer(idx, "idx"))
        part = AttnRanges()
        part.extend(super().__getitem__(idx))
        return part

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"AttnRanges({super().__repr__()})"


def _listed(ranges: Iterable[T]) -> Iterable[T]:
    """The argument, if it is a list of ranges in any form."""
    is_scalar = getattr(ranges, "ndim", None) == 0
    if is_scalar or not isinstance(ranges, Iterable) or isinstance(ranges, (str, AttnRange)):
        raise TypeError(
            f"ranges must be a list of (start, end) pairs, got {shown(ranges)}; "
            f"pass [[start, end], ...]"
        )
    return ranges


def _range(value: object) -> AttnRange:
    """The range itself, or a new one of a pair."""
    return value if isinstance(value, AttnRange) else AttnRange.from_range(value)  # type: ignore[arg-type]


def check_ranges(value: object, name: str) -> None:
    """Refuse what is no AttnRanges, and items that are no ranges."""
    remedy = "pass AttnRanges.from_ranges([[start, end], ...])"
    instance(value, AttnRanges, name, remedy)
    for item in value:  # type: ignore[attr-defined]
        instance(item, AttnRange, f"an item of {name}", remedy)
