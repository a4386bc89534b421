"""AttnRanges is a list: items that come and go, against Python's own list."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.magi_attention import AttnRange, AttnRanges

PAIRS = st.tuples(st.integers(0, 9), st.integers(0, 4)).map(lambda p: (p[0], p[0] + p[1]))
INDICES = st.integers(-7, 7)


@given(pairs=st.lists(PAIRS, max_size=6), idx=INDICES, pair=PAIRS)
def test_items_come_and_go_as_in_a_list(
    pairs: list[tuple[int, int]], idx: int, pair: tuple[int, int]
) -> None:
    ranges, plain = AttnRanges.from_ranges(pairs), list(pairs)
    ranges.insert(idx, AttnRange(*pair))
    plain.insert(idx, pair)
    ranges.append(AttnRange(*pair))
    ranges.extend(AttnRanges.from_ranges(pairs))
    plain += [pair, *pairs]
    assert ranges.to_naive_ranges() == plain == [(r.start, r.end) for r in ranges]
    assert (ranges.size, len(ranges), ranges.is_empty()) == (len(plain), len(plain), False)
    if -len(plain) <= idx < len(plain):
        assert ranges[idx] == AttnRange(*plain[idx])
        assert ranges.pop(idx) == AttnRange(*plain.pop(idx))
    assert ranges.pop() == AttnRange(*plain.pop())
    assert ranges.to_naive_ranges() == plain


@given(
    pairs=st.lists(PAIRS, max_size=6), first=INDICES, last=INDICES, step=st.sampled_from([1, 2, -1])
)
def test_a_slice_is_a_list_of_its_own(
    pairs: list[tuple[int, int]], first: int, last: int, step: int
) -> None:
    ranges = AttnRanges.from_ranges(pairs)
    part = ranges[first:last:step]
    assert type(part) is AttnRanges and part.to_naive_ranges() == pairs[first:last:step]
    part.append(AttnRange(0, 1))
    assert ranges.to_naive_ranges() == pairs


@given(pairs=st.lists(PAIRS, min_size=1, max_size=6))
def test_what_a_list_says_of_all_its_ranges(pairs: list[tuple[int, int]]) -> None:
    ranges = AttnRanges.from_ranges(pairs)
    lengths = [end - start for start, end in pairs]
    assert (ranges.total_seqlen, ranges.max_seqlen) == (sum(lengths), max(lengths))
    assert ranges.start == min(start for start, _ in pairs)
    assert ranges.end == max(end for _, end in pairs)
    assert ranges.points == sorted({point for pair in pairs for point in pair})


def test_a_list_without_ranges() -> None:
    ranges = AttnRanges()
    assert ranges.is_empty() and not ranges.size and not ranges.points
    assert (ranges.total_seqlen, ranges.max_seqlen) == (0, 0)
    with pytest.raises(IndexError, match="one of 0 ranges, got -1; look at size"):
        ranges.pop()


def test_a_pair_becomes_a_range() -> None:
    ranges = AttnRanges()
    ranges.append((3, 5))  # type: ignore[arg-type]
    ranges.insert(0, [1, 2])  # type: ignore[arg-type]
    assert all(type(r) is AttnRange for r in ranges) and ranges.points == [1, 2, 3, 5]


def test_lists_are_equal_by_their_ranges_and_to_nothing_else() -> None:
    ranges = AttnRanges.from_ranges([[0, 1], [2, 3]])
    twin, turned = ranges.clone(), AttnRanges.from_ranges([[2, 3], [0, 1]])
    assert ranges == twin and hash(ranges) == hash(twin)
    assert ranges != turned and ranges != [AttnRange(0, 1), AttnRange(2, 3)]
    assert repr(ranges) == "AttnRanges([[0, 1), [2, 3)])"


@pytest.mark.parametrize(
    "act, text",
    [
        (lambda r: r.append(AttnRange(0, 1), check=1), "check must be True or False, got 1"),
        (lambda r: r.insert(0, AttnRange(0, 1), check="no"), "check must be True or False"),
        (lambda r: r.extend(r, check=None), "check must be True or False, got None"),
        (
            lambda r: r.extend([[0, 1]]),
            r"attn_ranges must be an AttnRanges, got \[\[0, 1\]\]; pass",
        ),
        (
            lambda r: r.__setitem__(slice(0, 1), [[0, 1]]),
            "the ranges of a slice must be an AttnRanges",
        ),
        (lambda r: r.insert(0.5, AttnRange(0, 1)), r"idx must be an integer, got 0\.5"),
        (lambda r: r["0"], "idx must be an integer, got '0'"),
    ],
)
def test_a_refused_argument_changes_nothing(act: Callable[[AttnRanges], Any], text: str) -> None:
    ranges = AttnRanges.from_ranges([[4, 6]])
    with pytest.raises(TypeError, match=text):
        act(ranges)
    assert ranges.to_naive_ranges() == [(4, 6)]


def test_a_list_keeps_the_ranges_it_is_given() -> None:
    r = AttnRange(3, 8)
    ranges = AttnRanges()
    ranges.append(r)
    ranges[0].end = 9
    assert r.end == 9 and ranges.clone()[0] is not r
    derived = (ranges.sort(), ranges.merge(), ranges.truncate(), ranges.clear_empty())
    for other in derived:
        other[0].start = 4
    assert r.start == 3, "what gives new ranges copies them"


def test_items_are_assigned() -> None:
    ranges = AttnRanges.from_ranges([[0, 1], [2, 3], [4, 5]])
    ranges[1] = AttnRange(7, 9)
    ranges[-1] = (5, 6)  # type: ignore[assignment]
    assert ranges.to_naive_ranges() == [(0, 1), (7, 9), (5, 6)]
    ranges[:2] = AttnRanges.from_ranges([[1, 2], [3, 4]])
    assert ranges.to_naive_ranges() == [(1, 2), (3, 4), (5, 6)]
    with pytest.raises(ValueError, match="a slice of 2 ranges must get as many, got 1"):
        ranges[:2] = AttnRanges.from_ranges([[1, 2]])
    for act in (lambda: ranges[3], lambda: ranges.pop(-4), lambda: ranges.__setitem__(3, (0, 1))):
        with pytest.raises(
            IndexError, match=r"idx must name one of 3 ranges, got .*; look at size"
        ):
            act()


@pytest.mark.parametrize("end", ["start", "end"])
def test_a_list_without_ranges_has_no_ends(end: str) -> None:
    with pytest.raises(ValueError, match="need a range, got a list without one"):
        getattr(AttnRanges(), end)
