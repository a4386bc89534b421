"""Ranges as the sets of tokens that they are, each method against Python's own sets."""

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.magi_attention import (
    AttnMaskType,
    AttnRange,
    AttnRanges,
    apply_padding,
)

PAIRS = st.tuples(st.integers(0, 24), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1]))
RANGE = PAIRS.map(AttnRange.from_range)
RANGES = st.lists(PAIRS, max_size=6).map(AttnRanges.from_ranges)


def tokens(*ranges: AttnRange) -> set[int]:
    return set(chain.from_iterable(range(r.start, r.end) for r in ranges))


def count(*ranges: AttnRange) -> Counter[int]:
    return Counter(chain.from_iterable(range(r.start, r.end) for r in ranges))


def in_order(ranges: AttnRanges) -> list[int]:
    return list(chain.from_iterable(range(r.start, r.end) for r in ranges))


@given(a=RANGE, b=RANGE)
def test_two_ranges_are_two_sets(a: AttnRange, b: AttnRange) -> None:
    assert tokens(*a.union(b)) == tokens(a) | tokens(b)
    assert a.union_size(b) == len(tokens(a) | tokens(b))
    assert len(a.union(b)) == (1 if tokens(a) & tokens(b) else 2)
    assert tokens(*a.diff_by(b)) == tokens(b) - tokens(a)
    assert all(not r.is_empty() for r in a.diff_by(b))
    assert tokens(a.intersect(b)) == tokens(a) & tokens(b)
    assert a.intersect_size(b) == len(tokens(a) & tokens(b))


@given(a=RANGES, b=RANGES)
def test_holes_and_overlaps_are_set_operations(a: AttnRanges, b: AttnRanges) -> None:
    holes, shared = a.find_hole_ranges(b), a.find_overlap_ranges(b)
    assert tokens(*holes) == tokens(*a) - tokens(*b)
    assert tokens(*shared) == tokens(*a) & tokens(*b)
    for result in (holes, shared):
        assert result.is_merged() and not any(r.is_empty() for r in result)


@given(a=RANGES, b=RANGES)
def test_who_says_merged_is_not_believed(a: AttnRanges, b: AttnRanges) -> None:
    said = {"is_self_merged": True, "is_other_merged": True}
    assert a.find_hole_ranges(b, **said) == a.find_hole_ranges(b)
    assert a.find_overlap_ranges(b, **said) == a.find_overlap_ranges(b)
    merged = a.merge()
    assert merged.find_hole_ranges(b, **said) == a.find_hole_ranges(b)
    assert merged == a.merge(), "asking changes nothing"


@given(a=RANGES, b=RANGES)
def test_sizes_count_every_holder(a: AttnRanges, b: AttnRanges) -> None:
    held = count(*a)
    assert a.union_size() == a.total_seqlen == held.total()
    assert a.intersect_size() == sum(n - 1 for n in held.values())
    assert a.union_size_with(b) == (held + count(*b)).total()
    both = tokens(*a) & tokens(*b)
    assert a.intersect_size_with(b) == sum((held + count(*b))[t] - 1 for t in both)
    assert a.points == sorted({p for r in a for p in (r.start, r.end)})
    assert a.is_non_overlap() == all(n == 1 for n in held.values())


@given(a=RANGES, low=st.integers(-2, 30), size=st.integers(0, 12))
def test_truncated_ranges_keep_what_lies_inside(a: AttnRanges, low: int, size: int) -> None:
    cut = a.truncate(low, low + size)
    assert count(*cut) == Counter({t: n for t, n in count(*a).items() if low <= t < low + size})
    assert not any(r.is_empty() for r in cut)
    assert a.truncate() == a.clear_empty()


@given(a=RANGES, size=st.integers(1, 9))
def test_chunks_are_the_tokens_in_their_order(a: AttnRanges, size: int) -> None:
    pieces = a.chunk(size, check=False)
    assert list(chain.from_iterable(map(in_order, pieces))) == in_order(a)
    assert [p.total_seqlen for p in pieces[:-1]] == [size] * (len(pieces) - 1)
    assert all(0 < p.total_seqlen <= size for p in pieces)
    if a.is_non_overlap():
        assert a.chunk(size) == pieces
    else:
        with pytest.raises(ValueError, match=r"must not share tokens.*merge\(\) them first"):
            a.chunk(size)


@given(a=RANGES, b=RANGES)
def test_a_place_is_where_the_tokens_stand_end_to_end(a: AttnRanges, b: AttnRanges) -> None:
    line = sorted(tokens(*a))
    inside = AttnRanges.from_ranges(r for r in a.find_overlap_ranges(b))
    for original, place in zip(inside, a.make_ranges_local(inside), strict=True):
        assert line[place.start : place.end] == in_order(AttnRanges.from_ranges([original]))
        alone, holder = a.make_range_local(original)
        assert alone == place and original.is_subrange_of(holder) and holder in list(a.merge())
    for hole in b.find_hole_ranges(a):
        with pytest.raises(ValueError, match="must lie inside one of the merged ranges"):
            a.make_ranges_local(AttnRanges.from_ranges([hole]))


@given(a=RANGES, unit=st.integers(1, 7))
def test_aligned_ranges_are_whole_units(a: AttnRanges, unit: int) -> None:
    wide = a.clear_empty().merge_with_split_alignment(unit)
    units = {t // unit for t in tokens(*a)}
    assert tokens(*wide) == {u * unit + i for u in units for i in range(unit)} and wide.is_merged()


@given(a=RANGES, b=RANGES)
def test_equal_lists_have_equal_hashes(a: AttnRanges, b: AttnRanges) -> None:
    assert hash(a) == hash(a.clone()) and len({a, a.clone()}) == 1
    assert (a == b) == (len({a, b}) == 1)


def test_padding_is_one_more_slice_that_sees_nothing() -> None:
    q, k = AttnRanges.from_ranges([[0, 4], [4, 6]]), AttnRanges.from_ranges([[0, 4], [0, 6]])
    padded = apply_padding(q, k, ["causal", AttnMaskType.FULL], total_seqlen=6, pad_size=2)
    assert padded[0].to_naive_ranges() == [(0, 4), (4, 6), (6, 8)]
    assert padded[1].to_naive_ranges() == [(0, 4), (0, 6), (0, 0)]
    assert padded[2] == [AttnMaskType.CAUSAL, AttnMaskType.FULL, AttnMaskType.FULL]
    assert (len(q), len(k)) == (2, 2)
    with pytest.raises(ValueError, match="must pair up, got 2 and 1"):
        apply_padding(q, k[:1], "full", 6, 2)
