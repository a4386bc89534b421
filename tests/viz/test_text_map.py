"""A plan as characters: the digit of a row's owner where the row sees keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from megatron_magi import AttnMask, masks
from megatron_magi.viz.plan_facts import LayoutFacts
from megatron_magi.viz.text_map import DIGITS, side_by_side, text_map

Ranges = Sequence[tuple[int, int]]


def layout(mask: AttnMask, *ranges: Ranges, loads: Sequence[int] | None = None) -> LayoutFacts:
    """Each rank's rows as runs."""
    none = np.zeros(len(ranges), np.int64)
    tiles = np.array(loads or [1] * len(ranges))
    return LayoutFacts(
        mask, tuple(np.array(r).reshape(-1, 2) for r in ranges), tiles, none, none, 0
    )


def test_every_cell_of_a_small_mask_is_a_character() -> None:
    made = layout(masks.from_cu_seqlens([0, 3, 6]), [(0, 1), (5, 6)], [(1, 5)])
    assert text_map(made) == [
        "0.....",
        "11....",
        "111...",
        "...1..",
        "...11.",
        "...000",
    ]


def test_a_block_shows_any_cell_and_the_owner_of_its_middle_row() -> None:
    made = layout(masks.causal(12), [(0, 3), (9, 12)], [(3, 9)])
    assert text_map(made, rows=4, columns=3) == ["0..", "11.", "111", "000"]


def test_a_window_leaves_blocks_empty() -> None:
    made = layout(masks.from_cu_seqlens([0, 8], window_size=(1, 0)), [(0, 8)])
    assert text_map(made, rows=4, columns=4) == ["0...", "00..", ".00.", "..00"]


def test_digits_of_many_ranks_begin_again() -> None:
    cp_size = len(DIGITS) + 2
    made = layout(masks.full(cp_size, cp_size), *([(r, r + 1)] for r in range(cp_size)))
    owners = "".join(line[0] for line in text_map(made, rows=cp_size, columns=1))
    assert owners == DIGITS + "01" and len(set(DIGITS)) == len(DIGITS)


def test_layouts_stand_beside_each_other_under_their_balance() -> None:
    mask = masks.causal(2)
    first = layout(mask, [(0, 1)], [(1, 2)], loads=[1, 3])
    second = layout(mask, [(1, 2)], [(0, 1)], loads=[2, 2])
    assert side_by_side({"a": first, "long name": second}).splitlines() == [
        "a: max/mean 1.500   long name: max/mean 1.000",
        "0.                  1.",
        "11                  00",
    ]


def test_a_layout_that_the_mask_does_not_have_is_told_above() -> None:
    made = layout(masks.causal(2), [(0, 2)])
    above, head, *rows = side_by_side({"a": None, "b": made}).splitlines()
    assert above.startswith("a: - (only masks of packed documents")
    assert head == "b: max/mean 1.000" and rows == ["0.", "00"]


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_without_any_layout_there_are_only_reasons(names: list[str]) -> None:
    assert len(side_by_side(dict.fromkeys(names)).splitlines()) == len(names)
