"""Ranges as sets of rows, against Python's own sets."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.core.mask.row_ranges import joined, without

ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8).map(
    lambda pairs: np.array([(a, a + n) for a, n in pairs], np.int32).reshape(-1, 2)
)


def rows(x: np.ndarray) -> set[int]:
    return {row for start, end in x.tolist() for row in range(start, end)}


@given(ranges)
def test_joined(x: np.ndarray) -> None:
    union = joined(x)
    assert rows(union) == rows(x) and union.dtype == np.int32
    assert (union[1:, 0] > union[:-1, 1]).all()


@given(ranges, ranges)
def test_without(x: np.ndarray, y: np.ndarray) -> None:
    kept = without(joined(x), joined(y))
    assert rows(kept) == rows(x) - rows(y)
    assert (kept[:, 0] < kept[:, 1]).all() and (kept[1:, 0] >= kept[:-1, 1]).all()
