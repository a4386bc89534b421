"""AttnMask checks itself, and equal masks are equal."""

import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.core.mask import AttnMask, AttnSlice
from megatron_magi.core.mask.builders import from_cu_seqlens, from_dense
from megatron_magi.core.mask.slices import BAND_MAX, BAND_MIN

SIZE = 10
band = st.sampled_from([BAND_MIN, BAND_MAX, *range(-4, 5)])
spans = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)


@given(st.lists(st.tuples(spans, spans, band, band), max_size=4))
def test_refused_exactly_when_two_slices_share_a_cell(rows: list) -> None:
    slices = [AttnSlice(*q, *k, lo, hi) for q, k, lo, hi in rows]
    counts = np.zeros((SIZE, SIZE), int)
    for s in slices:
        diagonal = np.arange(s.k_start, s.k_end) - np.arange(s.q_start, s.q_end)[:, None]
        counts[s.q_start : s.q_end, s.k_start : s.k_end] += (diagonal >= s.d_lo) & (
            diagonal <= s.d_hi
        )
    if counts.max(initial=0) > 1:
        with pytest.raises(ValueError, match="must not share a cell"):
            AttnMask(slices, SIZE, SIZE)
    else:
        mask = AttnMask(slices, SIZE, SIZE)
        assert np.array_equal(mask.to_dense(), counts > 0)
        assert mask.area() == counts.sum()


def test_slices_that_meet_after_the_one_between_them_ended_are_refused() -> None:
    band, wall = AttnSlice(0, 10, 0, 12, 0, 1), AttnSlice(0, 10, 8, 10)
    between = AttnSlice(0, 1, 4, 5)
    for order in itertools.permutations((band, between, wall)):
        with pytest.raises(ValueError, match="must not share a cell"):
            AttnMask(list(order), 12, 12)


@pytest.mark.parametrize(
    "row, text",
    [
        ((0, 9, 0, 8), r"q_end <= total_seqlen_q = 8, got \[0, 9\)"),
        ((0, 8, 0, 9), r"k_end <= total_seqlen_k = 8, got \[0, 9\)"),
        ((-1, 8, 0, 8), r"got \[-1, 8\)"),
        ((5, 3, 0, 8), r"got \[5, 3\)"),
    ],
)
def test_bounds_are_checked(row: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AttnMask([AttnSlice(*row)], 8, 8)


def test_order_of_slices_does_not_matter() -> None:
    a, b = AttnSlice(0, 4, 0, 4, BAND_MIN, 0), AttnSlice(4, 8, 4, 8)
    one, two = AttnMask([a, b], 8, 8), AttnMask([b, a], 8, 8)
    assert one == two and hash(one) == hash(two) and one.digest == two.digest
    assert one != AttnMask([a, b], 9, 9) and one.digest != AttnMask([a, b], 9, 9).digest
    assert one.digest != AttnMask([a], 8, 8).digest


def test_slices_cannot_be_changed_and_masks_pickle() -> None:
    mask = from_cu_seqlens([0, 3, 8])
    with pytest.raises(ValueError, match="read-only"):
        mask.slices[0, 0] = 1
    for twin in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert twin == mask
        with pytest.raises(ValueError, match="read-only"):
            twin.slices[0, 0] = 1


def test_dense_size_is_limited() -> None:
    with pytest.raises(ValueError, match="to_dense makes at most"):
        from_cu_seqlens([0, 1 << 20]).to_dense()


@given(st.integers(0, 2**36 - 1))
def test_dense_round_trip(bits: int) -> None:
    dense = np.array([bits >> i & 1 for i in range(36)], dtype=bool).reshape(6, 6)
    assert np.array_equal(from_dense(dense).to_dense(), dense)


def test_diagonals_fit_in_int32() -> None:
    assert AttnMask([], 2**30 - 1, 0).total_seqlen_q == 2**30 - 1
    with pytest.raises(ValueError, match="between 0 and 1073741823 tokens, got 1073741824"):
        AttnMask([], 2**30, 0)


def test_slices_are_sorted_by_every_column() -> None:
    rows = [(0, 4, 0, 4, 2, 3), (0, 4, 0, 4, -3, -2), (0, 4, 0, 4, 0, 0), (0, 4, 4, 8, -9, 9)]
    mask = AttnMask([AttnSlice(*row) for row in rows], 8, 8)
    found = [tuple(row) for row in mask.slices.tolist()]
    assert found == sorted(found) and len(found) == 4
