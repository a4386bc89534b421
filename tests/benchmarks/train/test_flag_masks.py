"""Every mask of a control has its one error."""

from __future__ import annotations

import numpy as np

from benchmarks.train import flag_masks
from megatron_magi import masks
from megatron_magi.launcher.documents import MaskRequest

TILE = flag_masks.TILE


def test_a_document_lacks_its_last_tile() -> None:
    bounds = (0, 300, 400, 1024)
    causal = masks.from_cu_seqlens(list(bounds)).to_dense()
    request = MaskRequest(bounds, None)
    for made, end in ((flag_masks.tile_of_longest, 1024), (flag_masks.tile_of_shortest, 300)):
        expected = causal.copy()
        expected[end - TILE : end, end - 2 * TILE : end - TILE] = False
        assert np.array_equal(made(request).to_dense(), expected)
    short = MaskRequest((0, 200, 400), None)
    assert flag_masks.tile_of_longest(short) == masks.from_cu_seqlens([0, 200, 400])


def test_the_first_boundary_is_one_token_late() -> None:
    moved = flag_masks.moved_by_one(MaskRequest((0, 300, 400, 1024), None))
    assert moved == masks.from_cu_seqlens([0, 301, 400, 1024])


def test_last_queries_of_every_document_do_not_see_its_first_keys() -> None:
    bounds = (0, 1024, 2048)
    expected = masks.from_cu_seqlens(list(bounds)).to_dense()
    for start in bounds[:-1]:
        expected[start + 1024 - TILE : start + 1024, start : start + 4 * TILE] = False
    hidden = flag_masks.first_keys(MaskRequest(bounds, None))
    assert np.array_equal(hidden.to_dense(), expected)
