"""The solver's slice algebra against dense masks."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import _solver

SIZE = 14  # the dense matrices are SIZE x SIZE
INT32 = np.iinfo(np.int32)

slice_rows = st.tuples(
    st.integers(0, SIZE),
    st.integers(0, SIZE),
    st.integers(0, SIZE),
    st.integers(0, SIZE),
    st.one_of(st.integers(-SIZE, SIZE), st.just(int(INT32.min))),
    st.one_of(st.integers(-SIZE, SIZE), st.just(int(INT32.max))),
)


def as_slices(rows: list) -> np.ndarray:
    return np.array(rows, np.int32).reshape(-1, 6)


def count_cells(slices: np.ndarray, size: int = SIZE) -> np.ndarray:
    """How many slices cover each cell, straight from the definition."""
    q, k = np.mgrid[0:size, 0:size]
    count = np.zeros((size, size), int)
    for q0, q1, k0, k1, lo, hi in slices.tolist():
        count += (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1) & (lo <= k - q) & (k - q <= hi)
    return count


@given(st.lists(slice_rows, max_size=6))
def test_canonical_form_keeps_cells_and_is_the_bounding_box(rows):
    slices = as_slices(rows)
    canonical = _solver.canonical_slices(slices)
    assert np.array_equal(count_cells(canonical), count_cells(slices))
    for row in canonical:
        q, k = np.nonzero(count_cells(row[None]))
        box = (q.min(), q.max() + 1, k.min(), k.max() + 1, (k - q).min(), (k - q).max())
        assert tuple(row.tolist()) == box


@given(slice_rows)
def test_area_counts_cells(row):
    slices = as_slices([row])
    assert _solver.slice_areas(slices).tolist() == [count_cells(slices).sum()]


def test_area_of_a_two_billion_token_sequence_is_exact():
    n = int(INT32.max)
    slices = as_slices([(0, n, 0, n, INT32.min, 0), (0, n, 0, n, INT32.min, INT32.max)])
    assert _solver.slice_areas(slices).tolist() == [n * (n + 1) // 2, n * n]


@given(st.lists(slice_rows, max_size=4), st.integers(0, SIZE), st.integers(0, SIZE))
def test_cutting_conserves_area_and_cells(rows, q_cut, k_cut):
    slices = as_slices(rows)
    parts = [
        _solver.cut_slices(slices, q0, q1, k0, k1)
        for q0, q1 in ((0, q_cut), (q_cut, SIZE))
        for k0, k1 in ((0, k_cut), (k_cut, SIZE))
    ]
    pieces = np.concatenate(parts)
    assert np.array_equal(count_cells(pieces), count_cells(slices))
    assert _solver.slice_areas(pieces).sum() == _solver.slice_areas(slices).sum()
    assert (_solver.slice_areas(pieces) > 0).all()


@given(st.lists(slice_rows, max_size=6))
@settings(max_examples=300)
def test_find_overlap_agrees_with_dense(rows):
    slices = as_slices(rows)
    found = _solver.find_overlap(slices)
    if count_cells(slices).max() <= 1:
        assert found is None
    else:
        i, j = found
        assert i < j
        assert count_cells(slices[[i, j]]).max() == 2


def partition(rng: np.random.Generator, num_cuts: int) -> np.ndarray:
    """Slices that tile a square exactly: a band partition of every rectangle of a grid."""
    rows = []
    cuts = [0, *sorted(rng.integers(1, SIZE, num_cuts).tolist()), SIZE]
    for q0, q1 in itertools.pairwise(cuts):
        for k0, k1 in itertools.pairwise(cuts):
            diagonal = int(rng.integers(-SIZE, SIZE))
            rows.append((q0, q1, k0, k1, INT32.min, diagonal))
            rows.append((q0, q1, k0, k1, diagonal + 1, INT32.max))
    return as_slices(rows)[rng.permutation(len(rows))]


@pytest.mark.parametrize("seed", range(40))
def test_find_overlap_on_partitions_and_one_cell_more(seed):
    rng = np.random.default_rng(seed)
    slices = partition(rng, int(rng.integers(0, 4)))
    assert (count_cells(slices) == 1).all()
    assert _solver.find_overlap(slices) is None
    q, k = rng.integers(0, SIZE, 2).tolist()
    with_one_more = np.concatenate([slices, as_slices([(q, q + 1, k, k + 1, -SIZE, SIZE)])])
    i, j = _solver.find_overlap(with_one_more)
    assert j == len(slices)
    assert count_cells(with_one_more[[i, j]]).max() == 2


def test_find_overlap_is_fast_on_many_documents_and_on_nested_rows():
    n = 20_000
    start = np.arange(n) * 100
    packed = np.stack([start, start + 100, start, start + 100, start * 0 - 99, start * 0], 1)
    one = np.ones(n, np.int64)
    tree = np.stack([start * 0, n * 100 * one, start, start + 100, -n * 100 * one, 0 * one], 1)
    began = time.perf_counter()
    assert _solver.find_overlap(packed.astype(np.int32)) is None
    assert _solver.find_overlap(tree.astype(np.int32)) is None
    assert time.perf_counter() - began < 2.0


@pytest.mark.parametrize(
    "bad, error",
    [
        (np.zeros((2, 5), np.int32), ValueError),
        (np.zeros(6, np.int32), ValueError),
        (np.zeros((2, 6), np.int64), TypeError),
        (np.zeros((2, 6), np.float32), TypeError),
    ],
)
def test_wrong_arrays_are_refused(bad, error):
    for function in (_solver.canonical_slices, _solver.slice_areas, _solver.find_overlap):
        with pytest.raises(error):
            function(bad)


def test_hash_is_stable_and_sensitive():
    assert _solver.hash64(b"") != _solver.hash64(b"\0") != _solver.hash64(b"\0\0")
    assert _solver.hash64(b"abc", seed=1) != _solver.hash64(b"abc", seed=2)
    seen = {_solver.hash64(bytes([i, j])) for i in range(256) for j in range(256)}
    assert len(seen) == 65536
    assert _solver.hash64(b"magi plan") == 14503329616672984558  # plans travel between machines
