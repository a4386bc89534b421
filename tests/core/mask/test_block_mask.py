"""Block masks against the sentence that defines them, cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import masks
from megatron_magi.core.mask import AttnMask, block_mask

Blocks = npt.NDArray[np.bool_]


def cells_of(
    blocks: Blocks, size: tuple[int, int], total: tuple[int, int], causal: bool
) -> npt.NDArray[np.bool_]:
    """The definition: whole blocks, cut to the lengths and, if causal, along the diagonal."""
    whole = np.kron(blocks, np.ones(size, dtype=np.bool_)).astype(np.bool_)
    cells = whole[: total[0], : total[1]]
    return np.tril(cells, total[1] - total[0]) if causal else cells


@st.composite
def cases(draw: st.DrawFn) -> tuple[Blocks, tuple[int, int], tuple[int, int]]:
    shape = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    size = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    rows = st.lists(st.booleans(), min_size=shape[1], max_size=shape[1])
    blocks = draw(st.lists(rows, min_size=shape[0], max_size=shape[0]))
    total = tuple(n * b - draw(st.integers(0, b - 1)) for n, b in zip(shape, size, strict=True))
    return np.array(blocks), size, (total[0], total[1])


@settings(max_examples=300, deadline=None)
@given(cases(), st.booleans())
def test_any_block_mask(
    case: tuple[Blocks, tuple[int, int], tuple[int, int]], causal: bool
) -> None:
    """AttnMask itself refuses slices that share a cell."""
    blocks, size, total = case
    mask = masks.from_block_mask(blocks, size, *total, causal=causal)
    assert (mask.total_seqlen_q, mask.total_seqlen_k) == total
    np.testing.assert_array_equal(mask.to_dense(), cells_of(blocks, size, total, causal))


@pytest.mark.parametrize("size", [64, 128, 256, (64, 128), (192, 64)])
def test_sizes_that_kernels_use(size: int | tuple[int, int]) -> None:
    blocks = np.random.default_rng(0).random((5, 4)) < 0.4
    q, k = (size, size) if isinstance(size, int) else size
    mask = masks.from_block_mask(torch.from_numpy(blocks), size, 5 * q - 3, 4 * k - 1)
    want = cells_of(blocks, (q, k), (5 * q - 3, 4 * k - 1), False)
    np.testing.assert_array_equal(mask.to_dense(), want)


def test_lengths_are_those_of_whole_blocks() -> None:
    mask = masks.from_block_mask(np.ones((2, 3), bool), (4, 8))
    assert (mask.total_seqlen_q, mask.total_seqlen_k) == (8, 24)
    assert masks.from_block_mask(np.ones((2, 2), bool), 4, 7) == masks.full(7)
    assert masks.from_block_mask(np.zeros((2, 2), bool), 4, 7).num_slices == 0
    assert masks.from_block_mask(np.zeros((0, 0), bool), 4).to_dense().shape == (0, 0)
    for causal in (False, True):
        for shape in ((0, 2), (2, 0)):
            mask = masks.from_block_mask(np.zeros(shape, bool), 4, causal=causal)
            assert mask.to_dense().shape == (4 * shape[0], 4 * shape[1])


@pytest.mark.parametrize(
    "blocks, num_slices",
    [
        (["##.", "##.", "##."], 1),  # equal runs of consecutive rows
        (["##.", "...", "##."], 2),  # not across a row without the run
        ([".##", "##.", "##."], 2),
        (["#.#", "#.#", "#.#"], 2),  # several runs of a row, each for itself
        (["#.#", "..#", "#.#"], 3),
        (["###", "##.", "#.."], 3),  # runs that begin alike are not equal
    ],
)
def test_equal_runs_become_one_slice(blocks: list[str], num_slices: int) -> None:
    cells = np.array([[c == "#" for c in row] for row in blocks])
    assert masks.from_block_mask(cells, 2).num_slices == num_slices


def test_causal_blocks_join_whatever_lies_above_the_diagonal() -> None:
    square = np.ones((6, 6), bool)
    for blocks in (square, np.tril(square), np.tril(square, 2)):
        assert masks.from_block_mask(blocks, 4, 22, causal=True) == masks.causal(22)
    # Larger key blocks: the one on the diagonal has rows of two query blocks.
    wide = masks.from_block_mask(np.ones((6, 3), bool), (4, 8), causal=True)
    assert wide == masks.causal(24)
    # The diagonal block is hidden, so what is above it stays hidden too.
    below = masks.from_block_mask(np.triu(square, 1) | np.tril(square, -1), 4, causal=True)
    dense = below.to_dense()
    assert not np.triu(dense).any() and dense[4:8, :4].all()


def test_a_causal_mask_of_other_lengths_aligns_at_the_end() -> None:
    blocks = np.ones((2, 5), bool)
    want = masks.from_cu_seqlens([0, 8], [0, 20])
    assert masks.from_block_mask(blocks, 4, causal=True) == want
    more_queries = masks.from_block_mask(np.ones((5, 2), bool), 4, causal=True)
    assert more_queries == masks.from_cu_seqlens([0, 20], [0, 8])


def test_too_many_slices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask at the limit is taken; the limit itself would take half a minute."""
    monkeypatch.setattr(block_mask, "MAX_BLOCK_SLICES", 8)
    comb = np.tile([True, False], (1, 8))
    assert masks.from_block_mask(comb, 4).num_slices == 8
    with pytest.raises(ValueError, match="at most 8 slices, got 9 from 1 x 18 blocks; use larger"):
        masks.from_block_mask(np.tile([True, False], (1, 9)), 4)


@pytest.mark.parametrize(
    "build, error, text",
    [
        (
            lambda x: masks.from_block_mask(x, 4, 17),
            ValueError,
            "one row per 4 tokens of total_seqlen_q = 17, which are 5, got 3; pass",
        ),
        (
            lambda x: masks.from_block_mask(x, 4, 12, 8),
            ValueError,
            "one column per 4 tokens of total_seqlen_k = 8, which are 2, got 3; pass",
        ),
        (lambda x: masks.from_block_mask(x.astype(int), 4), TypeError, "must be boolean, got int"),
        (lambda x: masks.from_block_mask(x[0], 4), ValueError, r"must be \[num_q_blocks, num_k"),
        (lambda x: masks.from_block_mask(x[None], 4), ValueError, "one mask per group of heads"),
    ],
)
def test_bad_arguments_are_refused(
    build: Callable[[Any], AttnMask], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        build(np.ones((3, 3), bool))


@pytest.mark.parametrize(
    ("shape", "size", "totals"),
    [((1, 1), 2**40, (2**35, 2**36)), ((1, 1), 2**70, (10, 10)), ((1, 4), 2**31 - 1, ())],
)
def test_lengths_that_no_mask_has_are_refused(
    shape: tuple[int, int], size: int, totals: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"must be between \d and \d+, got \d+; pass one in range"):
        masks.from_block_mask(np.ones(shape, bool), size, *totals, causal=True)
