"""Sets of tokens as (start, end) pairs: what ``AttnRanges`` computes.

"Merged" pairs ascend and do not touch; an empty one may stand alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from math import inf
from typing import Any

from megatron_magi.magi_attention.range import NaiveRange

Pairs = list[NaiveRange]


def merged(pairs: Sequence[NaiveRange]) -> Pairs:
    """The union, merged."""
    union: Pairs = []
    for start, end in sorted(pairs):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def holes(own: Pairs, others: Pairs) -> Pairs:
    """The tokens of the one that are not in the other; both and the result merged."""
    edges = [-inf, *chain.from_iterable(_filled(others)), inf]
    gaps: Any = list(zip(edges[::2], edges[1::2], strict=True))
    return overlaps(own, gaps)


def overlaps(own: Pairs, others: Pairs) -> Pairs:
    """The tokens of both; both and the result merged."""
    shared: Pairs = []
    i = j = 0
    while i < len(own) and j < len(others):
        start, end = max(own[i][0], others[j][0]), min(own[i][1], others[j][1])
        if start < end:
            shared.append((start, end))
        if own[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return shared


def chunks(pairs: Pairs, size: int) -> list[Pairs]:
    """The tokens in their order, cut every ``size`` of them."""
    pieces: list[Pairs] = []
    room = 0
    for start, end in _filled(pairs):
        while start < end:
            if room == 0:
                pieces.append([])
                room = size
            stop = min(end, start + room)
            pieces[-1].append((start, stop))
            room -= stop - start
            start = stop
    return pieces


def offsets(pairs: Pairs) -> list[int]:
    """Where each begins when they are laid end to end."""
    lengths = [end - start for start, end in pairs]
    return list(accumulate(lengths, initial=0))[: len(pairs)]


def local_range(
    pairs: Pairs, places: list[int], other: NaiveRange
) -> tuple[NaiveRange, NaiveRange]:
    """(where ``other`` lies when merged pairs are laid at ``places``, the pair that holds it).

    Raises:
        ValueError: no pair holds it.
    """
    at = bisect_right(pairs, other[0], key=lambda pair: pair[0]) - 1
    if at < 0 or not (pairs[at][0] <= other[0] and other[1] <= pairs[at][1]):
        raise ValueError(
            f"a range must lie inside one of the merged ranges to have a place among them, got "
            f"[{other[0]}, {other[1]}); cut it with find_overlap_ranges first"
        )
    start = places[at] + other[0] - pairs[at][0]
    return (start, start + other[1] - other[0]), pairs[at]


def _filled(pairs: Pairs) -> Pairs:
    return [(start, end) for start, end in pairs if start < end]
