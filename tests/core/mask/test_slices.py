"""Slices against their dense cells."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.core.mask.mask import dense_from_slices
from megatron_magi.core.mask.slices import (
    BAND_MAX,
    BAND_MIN,
    AttnSlice,
    SliceType,
    as_slices,
    slices_from_ranges,
)

SIZE = 12


@st.composite
def slices(draw: st.DrawFn) -> AttnSlice:
    q_start, q_end = sorted(draw(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE))))
    k_start, k_end = sorted(draw(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE))))
    d_lo = draw(st.sampled_from([BAND_MIN, *range(-SIZE - 2, SIZE + 3)]))
    d_hi = draw(st.sampled_from([BAND_MAX, *range(-SIZE - 2, SIZE + 3)]))
    return AttnSlice(q_start, q_end, k_start, k_end, d_lo, d_hi)


def cells(s: AttnSlice | None, size: int = SIZE) -> np.ndarray:
    rows = np.zeros((0, 6), np.int32) if s is None else s.array()
    return dense_from_slices(rows.astype(np.int64), size, size)


@given(slices())
def test_canonical_keeps_cells_and_is_tight(s: AttnSlice) -> None:
    tight = s.canonical()
    assert np.array_equal(cells(tight), cells(s))
    if tight is None:
        return
    seen = cells(s)
    rows, cols = np.flatnonzero(seen.any(1)), np.flatnonzero(seen.any(0))
    assert (tight.q_start, tight.q_end) == (rows[0], rows[-1] + 1)
    assert (tight.k_start, tight.k_end) == (cols[0], cols[-1] + 1)
    assert tight.canonical() == tight


@given(slices())
def test_area_counts_cells(s: AttnSlice) -> None:
    assert s.area() == cells(s).sum()


@given(slices(), st.integers(0, SIZE), st.integers(0, SIZE))
def test_cutting_in_four_conserves_every_cell(s: AttnSlice, q: int, k: int) -> None:
    parts = [
        s.cut(q0, q1, k0, k1) for q0, q1 in ((0, q), (q, SIZE)) for k0, k1 in ((0, k), (k, SIZE))
    ]
    count = sum(cells(part).astype(int) for part in parts)
    assert np.array_equal(count, cells(s).astype(int))
    assert sum(part.area() for part in parts if part) == s.area()


@given(slices(), st.integers(0, 5), st.integers(0, 5))
def test_shift_moves_cells(s: AttnSlice, dq: int, dk: int) -> None:
    moved = cells(s.shift(dq, dk), SIZE + 5)
    assert np.array_equal(moved[dq : dq + SIZE, dk : dk + SIZE], cells(s))
    assert moved.sum() == cells(s).sum()


def visible(code: int, i: int, j: int, sq: int, sk: int) -> bool:
    """MagiAttention's rule: bit 1 moves the left edge with the row, bit 0 the right edge."""
    left = i if code & 2 else 0
    right = sk - (sq - 1 - i if code & 1 else 0)
    return left <= j < right


@pytest.mark.parametrize("code", list(SliceType))
@pytest.mark.parametrize("sq,sk", [(1, 1), (4, 4), (3, 7), (7, 3), (5, 1), (1, 5)])
def test_type_codes_follow_the_fields_rule(code: SliceType, sq: int, sk: int) -> None:
    rows = slices_from_ranges([[2, 2 + sq]], [[3, 3 + sk]], [code])
    dense = dense_from_slices(rows.astype(np.int64), SIZE, SIZE)
    for q in range(SIZE):
        for k in range(SIZE):
            inside = 2 <= q < 2 + sq and 3 <= k < 3 + sk
            assert dense[q, k] == (inside and visible(code, q - 2, k - 3, sq, sk)), (q, k)


@pytest.mark.parametrize(
    "q, k, types, text",
    [
        ([[0, 4], [4, 8]], [[0, 4]], None, "must pair up, got 2 and 1 rows"),
        ([[0, 4]], [[0, 4]], [4], "got 4 in row 0"),
        ([[0, 4]], [[0, 4]], [0, 1], r"one code per slice \(\[1\]\)"),
        ([[4, 0]], [[0, 4]], None, r"0 <= start <= end, got \[4, 0\]"),
        ([0, 4], [[0, 4]], None, r"must have shape \[num_slices, 2\], got \[2\]"),
        ([[0, 2**31]], [[0, 4]], None, "must fit in int32"),
    ],
)
def test_bad_ranges_are_refused(q: list, k: list, types: list | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        slices_from_ranges(q, k, types)


def test_floats_and_wrong_shapes_are_refused() -> None:
    with pytest.raises(TypeError, match="must hold integers, got float64"):
        as_slices(np.zeros((2, 6)))
    with pytest.raises(ValueError, match=r"got \[2, 5\]"):
        as_slices(np.zeros((2, 5), np.int32))
    assert as_slices([]).shape == (0, 6)


def test_a_slice_is_a_value_that_sorts() -> None:
    first, second = AttnSlice(0, 4, 0, 4, -1, 0), AttnSlice(0, 4, 0, 4, -1, 2)
    assert sorted([second, first]) == [first, second]
    assert len({first, second, AttnSlice(0, 4, 0, 4, -1, 0)}) == 2
    with pytest.raises(AttributeError):
        first.q_start = 1  # type: ignore[misc]


def test_no_ranges_are_no_slices() -> None:
    assert slices_from_ranges([], [], []).shape == (0, 6)


@pytest.mark.parametrize("bad", [[-1, 5], [5, 3], [-7, -5]])
@pytest.mark.parametrize("name", ["q_ranges", "k_ranges"])
def test_ranges_begin_at_0_and_end_behind_their_start(name: str, bad: list[int]) -> None:
    pair = {"q_ranges": [[0, 2], [2, 4]], "k_ranges": [[0, 2], [0, 0]]}
    assert len(slices_from_ranges(*pair.values(), None)) == 2
    pair[name][1] = bad
    with pytest.raises(ValueError, match=f"{name} must hold ranges with 0 <= start <= end, got"):
        slices_from_ranges(*pair.values(), None)


def test_codes_and_open_edges_are_the_published_numbers() -> None:
    """Callers pass the codes as integers, and the edges travel in int32."""
    assert {t.name: int(t) for t in SliceType} == {
        "FULL": 0, "CAUSAL": 1, "INV_CAUSAL": 2, "BI_CAUSAL": 3
    }  # fmt: skip
    bounds = np.iinfo(np.int32)
    assert (bounds.min, bounds.max) == (BAND_MIN, BAND_MAX)


def test_a_slice_holds_plain_integers() -> None:
    fields = vars(AttnSlice(*np.array([0, 4, 0, 4, -1, 0])))  # type: ignore[arg-type]
    assert {type(value) for value in fields.values()} == {int}
