"""AttnRange is a value."""

import pytest

from megatron_magi.magi_attention import AttnRange, RangeError


def test_a_range_is_a_value() -> None:
    r = AttnRange(start=3, end=8)
    assert r == AttnRange.from_range([3, 8]) == AttnRange.from_range(r) and len({r, r.clone()}) == 1
    assert (r.seqlen, len(r), r.to_naive_range(), repr(r)) == (5, 5, (3, 8), "[3, 8)")


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
