"""The blocks of a backward launch whose parts take turns: what each works on, and whom it waits
for. The kernel numbers them by the same code (csrc/attention/backward/blocks.h)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import masks
from megatron_magi.core.native import solver
from tests.core.kernel.bwd_steps import dense, slice_grids, steps_of


class Shape(NamedTuple):
    heads: tuple[int, int]
    splits: int
    lanes: int
    whole: int
    band_rows: int


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Legal launches: whole kv heads come without bands."""
    heads_kv, splits = draw(st.sampled_from([1, 2, 4, 6])), draw(st.sampled_from([1, 2, 4]))
    group = splits * draw(st.integers(1, 3))
    whole = draw(st.integers(0, heads_kv - 1))
    most = (heads_kv - whole) * splits
    fitting = [n for n in range(1, most + 1) if most % n == 0]
    lanes = draw(st.sampled_from([n for n in fitting if splits % n == 0 or n % splits == 0]))
    band_rows = draw(st.sampled_from([0, 64, 100, 192])) if whole == 0 else 0
    return Shape((heads_kv * group, heads_kv), splits, lanes, whole, band_rows)


def listed(slices: np.ndarray, num_q: int, num_k: int, shape: Shape) -> solver.BwdWorkList:
    work = solver.choose_bwd(slices, num_q, num_k, may_take_turns=False)
    return work.in_bands(shape.band_rows) if shape.band_rows else work


@settings(max_examples=150, deadline=None)
@given(slice_grids(), shapes())
def test_every_item_meets_every_head_once(case: tuple[np.ndarray, int, int], shape: Shape) -> None:
    work, (heads_q, heads_kv) = listed(*case, shape), shape.heads
    met = np.zeros((len(work.items), heads_q), np.int32)
    for item, kv_head, first, heads, *_ in work.blocks(*shape.heads, shape[1:4]).tolist():
        met[item, first : first + heads] += 1
        group = heads_q // heads_kv
        assert kv_head * group <= first and first + heads <= (kv_head + 1) * group
    assert (met == 1).all()


@settings(max_examples=150, deadline=None)
@given(slice_grids(), shapes())
def test_a_block_waits_for_blocks_before_it_alone(
    case: tuple[np.ndarray, int, int], shape: Shape
) -> None:
    """The turns of a sum follow each other in the order in which blocks start, and the parts of a
    kv head follow each other. So the first block that has not ended never waits."""
    work = listed(*case, shape)
    taken: dict[int, list[tuple[int, int]]] = {}
    for row in work.blocks(*shape.heads, shape[1:4]).tolist():
        item, kv_head, _, _, sums, turn, count, before = row
        if count > 1:
            seen = taken.setdefault(sums, [])
            assert before + turn == len(seen)
            seen.append((int(work.items[item][5]), kv_head))
            assert len(set(seen[before:])) == 1 and len(seen) - before <= count
    assert max(taken, default=0) < work.num_tiles * max(1, shape.lanes // shape.splits)
    parts = shape.splits * (work.items[:, 7] if len(work.items) else np.ones(1, np.int32))
    many = {int(t) for t, n in zip(work.items[:, 5], parts, strict=False) if n > 1}
    assert sum(map(len, taken.values())) == sum(
        (shape.heads[1] - shape.whole) * shape.splits
        for item in work.items.tolist()
        if item[5] in many
    )


@settings(max_examples=150, deadline=None)
@given(slice_grids(), st.sampled_from([1, 64, 100, 256]))
def test_bands_have_every_step_once(case: tuple[np.ndarray, int, int], band_rows: int) -> None:
    slices, num_q, num_k = case
    work = solver.choose_bwd(slices, num_q, num_k, may_take_turns=False)
    cut = work.in_bands(band_rows)
    seen = np.zeros((num_q, num_k), np.int32)
    rows: dict[int, list[int]] = {}
    for item in cut.items.tolist():
        tile, band, count = item[5:]
        assert band == len(rows.setdefault(tile, []))  # first bands first
        walk = [(cut.entries[e], q) for e, q in steps_of(cut, item)]
        assert len(walk) == item[4]
        rows[tile].append(count)
        for entry, q in walk:
            box = [[q, min(q + 64, entry[1]), *entry[2:6]]]
            seen += dense(np.array(box), num_q, num_k)
    np.testing.assert_array_equal(seen, dense(slices, num_q, num_k))
    assert sorted(rows) == list(range(len(work.items)))
    assert all(counts == [len(counts)] * len(counts) for counts in rows.values())
    assert sum(item[4] for item in cut.items.tolist()) == work.steps


def test_bands_keep_to_their_rows() -> None:
    work = solver.choose_bwd(masks.full(1000, 256).slices, 1000, 256, may_take_turns=False)
    work = work.in_bands(384)
    entries = [work.entries[item[2]][:2].tolist() for item in work.items.tolist()]
    assert entries == [[0, 384], [0, 384], [384, 768], [384, 768], [768, 1000], [768, 1000]]
