"""AttnRange is a value."""

from megatron_magi.magi_attention import AttnRange


def test_a_range_is_a_value() -> None:
    r = AttnRange(start=3, end=8)
    assert r == AttnRange.from_range([3, 8]) == AttnRange.from_range(r) and len({r, r.clone()}) == 1
    assert (r.seqlen, len(r), r.to_naive_range(), repr(r)) == (5, 5, (3, 8), "[3, 8)")
    assert r.offset(2) == AttnRange(5, 10)
    assert r.intersect(AttnRange(6, 20)) == AttnRange(6, 8)
    assert r.intersect_size(AttnRange(9, 20)) == 0 and r.truncate(end=2).is_empty()
    assert AttnRange(4, 5).is_subrange_of(r) and not r.is_overlap_with(AttnRange(8, 9))
