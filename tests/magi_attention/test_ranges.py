"""AttnRanges: a list of ranges, against Python's own list and sets."""

import copy
import pickle
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.magi_attention import (
    AttnMaskType,
    AttnRange,
    AttnRanges,
    RangeError,
    apply_padding,
)

PAIRS = st.lists(
    st.tuples(st.integers(0, 24), st.integers(0, 8)).map(lambda p: (p[0], sum(p))), max_size=6
)


def tokens(ranges: AttnRanges) -> set[int]:
    return set(chain.from_iterable(range(r.start, r.end) for r in ranges))


def test_a_reversed_range_is_refused() -> None:
    with pytest.raises(RangeError, match=r"start <= end, got \[5, 3\); swap them"):
        AttnRange(5, 3)
    with pytest.raises(RangeError):
        AttnRanges.from_ranges([[0, 2], [2, 1]])


def test_ranges_are_a_list() -> None:
    ranges = AttnRanges.from_ranges([[4, 6], [0, 3]])
    ranges.append(AttnRange(2, 5))
    assert (ranges.size, ranges.start, ranges.end) == (3, 0, 6)
    assert (ranges.total_seqlen, ranges.max_seqlen) == (8, 3)
    assert ranges.sort().to_naive_ranges() == [(0, 3), (2, 5), (4, 6)]
    assert ranges.merge().to_naive_ranges() == [(0, 6)]
    assert ranges[0] == AttnRange(4, 6) and ranges[1:].size == 2
    copied = ranges.clone()
    copied.extend(AttnRanges.from_ranges([[9, 9]]))
    assert copied.pop() == AttnRange(9, 9) and copied == ranges
    tensor = ranges.to_tensor()
    assert tensor.dtype == torch.int32 and tensor.tolist() == [[4, 6], [0, 3], [2, 5]]
    assert AttnRanges().is_empty() and AttnRanges().to_tensor().shape == (0, 2)
    assert (AttnRanges().total_seqlen, AttnRanges().max_seqlen) == (0, 0)
    assert repr(ranges) == "AttnRanges([[4, 6), [0, 3), [2, 5)])"


@given(pairs=PAIRS, cut=st.slices(6))
def test_items_come_and_go_as_in_a_list(pairs: list[tuple[int, int]], cut: slice) -> None:
    ranges, plain = AttnRanges.from_ranges(pairs), list(pairs)
    part = ranges[cut]
    assert type(part) is AttnRanges and part.to_naive_ranges() == plain[cut]
    part.append(AttnRange(0, 1))
    ranges.insert(1, (3, 5))  # type: ignore[arg-type]
    ranges.extend(pairs)  # type: ignore[arg-type]
    plain.insert(1, (3, 5))
    plain.extend(pairs)
    assert ranges.to_naive_ranges() == plain and all(type(r) is AttnRange for r in ranges)


@given(pairs=PAIRS)
def test_a_union_is_that_of_sets(pairs: list[tuple[int, int]]) -> None:
    ranges = AttnRanges.from_ranges(pairs)
    union = ranges.merge()
    assert tokens(union) == tokens(ranges)
    assert all(a.end < b.start for a, b in pairwise(union))
    assert ranges.to_naive_ranges() == pairs, "asking changes nothing"


@given(one=PAIRS, two=PAIRS)
def test_equal_lists_have_equal_hashes(one: Any, two: Any) -> None:
    a, b = AttnRanges.from_ranges(one), AttnRanges.from_ranges(two)
    assert hash(a) == hash(a.clone()) and (a == b) == (len({a, b}) == 1)
    for twin in (copy.copy(a), copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert type(twin) is AttnRanges and twin == a


def test_a_list_keeps_the_ranges_it_is_given() -> None:
    r = AttnRange(3, 8)
    ranges = AttnRanges()
    ranges.append(r)
    ranges[0].end = 9
    assert r.end == 9 and ranges.clone()[0] is not r
    for other in (ranges.sort(), ranges.merge(), AttnRanges.from_ranges(ranges)):
        other[0].start = 4
    assert r.start == 3, "what gives new ranges copies them"


@pytest.mark.parametrize(
    "act, text",
    [
        (lambda r: r.append(AttnRange(0, 1), check=1), "check must be True or False, got 1"),
        (lambda r: r.extend([[0, 1], [3]]), "a range must be a pair"),
        (lambda r: r.extend(3), "ranges must be a list of .* got 3; pass"),
        (lambda r: r.insert(0.5, AttnRange(0, 1)), r"idx must be an integer, got 0\.5"),
        (lambda r: r["0"], "idx must be an integer, got '0'"),
    ],
)
def test_a_refused_argument_changes_nothing(act: Callable[[AttnRanges], Any], text: str) -> None:
    ranges = AttnRanges.from_ranges([[4, 6]])
    with pytest.raises(TypeError, match=text):
        act(ranges)
    assert ranges.to_naive_ranges() == [(4, 6)]


def test_prefix_sums() -> None:
    ranges = AttnRanges.from_cu_seqlens([0, 3, 3, 7], 7)
    assert ranges.to_naive_ranges() == [(0, 3), (3, 3), (3, 7)]
    assert ranges.to_cu_seqlens(7) == [0, 3, 3, 7]
    with pytest.raises(ValueError, match="start at 0 and end at seq_len 8"):
        AttnRanges.from_cu_seqlens([0, 3, 7], 8)
    with pytest.raises(ValueError, match=r"cover \[0, 9\) one after another"):
        ranges.to_cu_seqlens(9)


def test_padding_is_one_more_slice_that_sees_nothing() -> None:
    q, k = AttnRanges.from_ranges([[0, 4], [4, 6]]), AttnRanges.from_ranges([[0, 4], [0, 6]])
    padded = apply_padding(q, k, ["causal", AttnMaskType.FULL], total_seqlen=6, pad_size=2)
    assert padded[0].to_naive_ranges() == [(0, 4), (4, 6), (6, 8)]
    assert padded[1].to_naive_ranges() == [(0, 4), (0, 6), (0, 0)]
    assert padded[2] == [AttnMaskType.CAUSAL, AttnMaskType.FULL, AttnMaskType.FULL]
    assert (len(q), len(k)) == (2, 2)
    with pytest.raises(ValueError, match="must pair up, got 2 and 1"):
        apply_padding(q, k[:1], "full", 6, 2)
    q[0] = (0, 4)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"an item of q_ranges must be an AttnRange, got \(0, 4\)"):
        apply_padding(q, k, "full", 6, 2)
