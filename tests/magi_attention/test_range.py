"""AttnRange is a value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.magi_attention import AttnRange, RangeError

RANGE = st.tuples(st.integers(0, 24), st.integers(0, 8)).map(lambda p: AttnRange(p[0], sum(p)))


def tokens(r: AttnRange) -> set[int]:
    return set(range(r.start, r.end))


def test_a_range_is_a_value() -> None:
    r = AttnRange(start=3, end=8)
    assert r == AttnRange.from_range([3, 8]) == AttnRange.from_range(r) and len({r, r.clone()}) == 1
    assert (r.seqlen, len(r), r.to_naive_range(), repr(r)) == (5, 5, (3, 8), "[3, 8)")
    assert r.offset(2) == AttnRange(5, 10)
    assert r.intersect(AttnRange(6, 20)) == AttnRange(6, 8)
    assert r.intersect_size(AttnRange(9, 20)) == 0 and r.truncate(end=2).is_empty()


@given(a=RANGE, b=RANGE)
def test_the_common_part_of_two_ranges_is_that_of_two_sets(a: AttnRange, b: AttnRange) -> None:
    assert tokens(a.intersect(b)) == tokens(a) & tokens(b) == tokens(a.truncate(b.start, b.end))
    assert a.intersect_size(b) == len(tokens(a) & tokens(b))


def test_an_end_is_set_and_checked() -> None:
    r = AttnRange(3, 8)
    r.start, r.end = 5, 6
    assert r == AttnRange(5, 6) and hash(r) == hash(AttnRange(5, 6))
    for name, value in (("start", 7), ("end", 4)):
        with pytest.raises(RangeError, match=r"start <= end.*set the other end first"):
            setattr(r, name, value)
    with pytest.raises(TypeError, match=r"AttnRange\.start must be an integer, got 1\.5"):
        r.start = 1.5  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        r.stop = 9  # type: ignore[attr-defined]
    assert r == AttnRange(5, 6), "a refused value changes nothing"
    copy = r.clone()
    copy.end = 9
    assert r.end == 6
