"""AttnRanges, a list of ranges and prefix sums."""

import pytest
import torch

from megatron_magi.magi_attention import AttnRange, AttnRanges, RangeError


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
    assert not ranges.is_sorted() and not ranges.is_non_overlap()
    assert ranges.sort().to_naive_ranges() == [(0, 3), (2, 5), (4, 6)]
    assert ranges.merge().to_naive_ranges() == [(0, 6)] and ranges.merge().is_merged()
    assert ranges[0] == AttnRange(4, 6) and ranges[1:].size == 2
    copy = ranges.clone()
    copy.extend(AttnRanges.from_ranges([[9, 9]]))
    assert copy.pop() == AttnRange(9, 9) and copy == ranges
    tensor = ranges.to_tensor()
    assert tensor.dtype == torch.int32 and tensor.tolist() == [[4, 6], [0, 3], [2, 5]]
    assert AttnRanges().is_empty() and AttnRanges().to_tensor().shape == (0, 2)


def test_prefix_sums() -> None:
    ranges = AttnRanges.from_cu_seqlens([0, 3, 3, 7], 7)
    assert ranges.to_naive_ranges() == [(0, 3), (3, 3), (3, 7)]
    assert ranges.is_cu_seqlens(7) and ranges.to_cu_seqlens(7) == [0, 3, 3, 7]
    with pytest.raises(ValueError, match="start at 0 and end at seq_len 8"):
        AttnRanges.from_cu_seqlens([0, 3, 7], 8)
    with pytest.raises(ValueError, match=r"cover \[0, 9\) one after another"):
        ranges.to_cu_seqlens(9)
