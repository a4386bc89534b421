"""The steps of the backward's work list in walk order, and random slices to make lists of."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

from megatron_magi.core.native import solver

TILE_Q = 64


def tile_k(head_dim: int) -> int:
    """Keys of a tile: heads wider than 192 leave room for half as many."""
    return 64 if head_dim > 192 else 128


@st.composite
def slice_grids(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Disjoint banded slices on a random grid of q and k ranges, and the two lengths."""
    num_q, num_k = draw(st.integers(1, 400)), draw(st.integers(1, 400))
    cuts_q = sorted({0, num_q, *draw(st.lists(st.integers(0, num_q), max_size=4))})
    cuts_k = sorted({0, num_k, *draw(st.lists(st.integers(0, num_k), max_size=4))})
    rows = []
    for q0, q1 in itertools.pairwise(cuts_q):
        for k0, k1 in itertools.pairwise(cuts_k):
            low, high = k0 - (q1 - 1), k1 - 1 - q0
            bounds = sorted(draw(st.tuples(st.integers(low, high), st.integers(low, high))))
            kind = draw(st.sampled_from(["none", "full", "band", "two bands"]))
            if kind == "full":
                rows.append((q0, q1, k0, k1, low, high))
            elif kind == "band":
                rows.append((q0, q1, k0, k1, *bounds))
            elif kind == "two bands":
                rows.append((q0, q1, k0, k1, low, bounds[0]))
                rows.append((q0, q1, k0, k1, bounds[0] + 1, high))
    return np.array(rows, dtype=np.int32).reshape(-1, 6), num_q, num_k


def dense(slices: np.ndarray, num_q: int, num_k: int) -> np.ndarray:
    q, k = np.arange(num_q)[:, None], np.arange(num_k)[None]
    count = np.zeros((num_q, num_k), dtype=np.int32)
    for q0, q1, k0, k1, lo, hi in slices.tolist():
        count += (q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= lo) & (k - q <= hi)
    return count


def steps_of(work: solver.BwdWorkList, item: np.ndarray) -> list[tuple[int, int]]:
    """(entry, first query row) of an item in walk order."""
    steps = []
    entries = range(item[2], item[3])
    for e in reversed(entries) if work.descending else entries:
        rows = list(range(work.entries[e][0], work.entries[e][1], TILE_Q))
        steps += [(e, q) for q in (reversed(rows) if work.descending else rows)]
    return steps
