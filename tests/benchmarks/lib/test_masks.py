"""The benchmark's masks have the length they say, at listed and other lengths."""

from __future__ import annotations

import pytest

from benchmarks.lib import masks


@pytest.mark.parametrize("seqlen", [1024, 4096, 8192, 16384, 131072])
@pytest.mark.parametrize("name", sorted(masks.MASKS))
def test_every_mask_covers_the_sequence(name: str, seqlen: int) -> None:
    mask = masks.MASKS[name](seqlen)
    assert mask.total_seqlen_q == mask.total_seqlen_k == seqlen
    assert 0 < mask.area() <= seqlen**2


@pytest.mark.parametrize("table", [masks.SHORT_DOCS, masks.LONG_DOCS])
def test_documents_fill_the_length(table: dict[int, list[int]]) -> None:
    assert all(sum(lengths) == total for total, lengths in table.items())
    assert sum(masks.documents(table, 5000)) == 5000


def test_window_and_tiny_documents() -> None:
    assert masks.MASKS["swa1024"](4096).area() == 4096 * 1024 - 1024 * 1023 // 2
    assert masks.MASKS["tiny64"](4096).area() == 64 * 64 * 64
