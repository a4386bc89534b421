"""AttnRanges: a list of token ranges, and what such lists are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron_magi.checks import flag, instance, integer, integers, shown
from megatron_magi.core.tensor_checks import device as checked_device
from megatron_magi.magi_attention import range_sets
from megatron_magi.magi_attention.range import AttnRange, NaiveRange
from megatron_magi.magi_attention.range_list import RangeList


class AttnRanges(RangeList):
    """A list of ranges; row i of ``q_ranges`` and ``k_ranges`` is slice i of a mask.

    It keeps the ranges it is given, as a list does; what gives new ranges copies them. Equal lists
    have equal hashes, so leave one alone while it is a key of a dictionary.
    """

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
        return AttnRanges.from_ranges(range_sets.merged(self.to_naive_ranges()))

    def merge_with_split_alignment(self, split_alignment: int = 1) -> AttnRanges:
        """The union of the ranges widened to multiples of ``split_alignment``."""
        unit = integer(split_alignment, "split_alignment", 1)
        wide = [(r.start // unit * unit, -(-r.end // unit) * unit) for r in self]
        return AttnRanges.from_ranges(range_sets.merged(wide))

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
        pieces = range_sets.chunks(self.to_naive_ranges(), size)
        return [AttnRanges.from_ranges(piece) for piece in pieces]

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
        merged = self._merged()
        if prefix_offset is None:
            offsets = range_sets.offsets(merged)
        else:
            offsets = integers(prefix_offset, "prefix_offset")
        if len(offsets) != len(merged):
            raise ValueError(
                f"prefix_offset must have one place per merged range ({len(merged)}), got "
                f"{len(offsets)}; leave it out"
            )
        other = AttnRange.from_range(other_attn_range).to_naive_range()
        place, holder = range_sets.local_range(merged, offsets, other)
        return AttnRange(*place), AttnRange(*holder)

    def make_ranges_local(
        self, other_attn_ranges: AttnRanges, is_self_merged: bool = False
    ) -> AttnRanges:
        """`make_range_local` of each range: the places alone."""
        check_ranges(other_attn_ranges, "other_attn_ranges")
        flag(is_self_merged, "is_self_merged")
        merged = self._merged()
        offsets = range_sets.offsets(merged)
        others = other_attn_ranges.to_naive_ranges()
        places = [range_sets.local_range(merged, offsets, other)[0] for other in others]
        return AttnRanges.from_ranges(places)

    def find_hole_ranges(
        self,
        other_attn_ranges: AttnRanges,
        is_self_merged: bool = False,
        is_other_merged: bool = False,
    ) -> AttnRanges:
        """The tokens of these ranges that are not in the others, merged."""
        own, others = _two_unions(self, other_attn_ranges, is_self_merged, is_other_merged)
        return AttnRanges.from_ranges(range_sets.holes(own, others))

    def find_overlap_ranges(
        self,
        other_attn_ranges: AttnRanges,
        is_self_merged: bool = False,
        is_other_merged: bool = False,
    ) -> AttnRanges:
        """The tokens of both, ascending; merged."""
        own, others = _two_unions(self, other_attn_ranges, is_self_merged, is_other_merged)
        return AttnRanges.from_ranges(range_sets.overlaps(own, others))

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
        return self.is_sorted() and all(a.end < b.start for a, b in pairwise(self))

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

    def _merged(self) -> list[NaiveRange]:
        """The union as pairs. Whoever says that a list is merged is not believed: looking costs
        less than a wrong answer."""
        pairs = self.to_naive_ranges()
        return pairs if self.is_merged() else range_sets.merged(pairs)


def check_ranges(value: object, name: str) -> None:
    """Refuse what is no AttnRanges."""
    instance(value, AttnRanges, name, "pass AttnRanges.from_ranges([[start, end], ...])")


def _two_unions(
    own: AttnRanges, other: AttnRanges, is_self_merged: bool, is_other_merged: bool
) -> tuple[list[NaiveRange], list[NaiveRange]]:
    check_ranges(other, "other_attn_ranges")
    flag(is_self_merged, "is_self_merged")
    flag(is_other_merged, "is_other_merged")
    return own._merged(), other._merged()
