"""Masks with one error each: negative controls, which a comparison must catch.

They are functions for `--magi-mask`. The flag joins the samples of a microbatch to one stream,
whose bounds a request has.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_magi import AttnMask, masks
from megatron_magi.launcher.documents import MaskRequest

TILE = 128
"""Queries of a tile, and its keys."""


def moved_by_one(request: MaskRequest) -> AttnMask:
    """The first boundary between two documents is one token late."""
    first, *rest = request.bounds[1:-1] or (request.total_seqlen // 2,)
    return masks.from_cu_seqlens([0, first + 1, *rest, request.total_seqlen])


def first_keys(request: MaskRequest) -> AttnMask:
    """In every document the last 128 queries do not see the first 512 keys."""
    parts = []
    for start, end in pairwise(request.bounds):
        parts += _around(start, end, _Hidden(end - TILE, TILE, start, 4 * TILE))
    return _causal(parts, request.total_seqlen)


@dataclass(frozen=True, order=True)
class Document:
    """Some tokens of a microbatch."""

    length: int
    start: int
    end: int


def tile_of_longest(request: MaskRequest) -> AttnMask:
    """The last queries of the longest document do not see the keys before them."""
    return _without_tile_of(max(_documents(request)), request)


def tile_of_shortest(request: MaskRequest) -> AttnMask:
    """The same in the shortest document that has such a tile."""
    fitting = [document for document in _documents(request) if document.length >= 2 * TILE]
    return _without_tile_of(min(fitting, default=max(_documents(request))), request)


def _documents(request: MaskRequest) -> list[Document]:
    return [Document(end - start, start, end) for start, end in pairwise(request.bounds)]


def _without_tile_of(document: Document, request: MaskRequest) -> AttnMask:
    """Causal documents, of which this one lacks its last tile next to the diagonal."""
    if document.length < 2 * TILE:
        return masks.from_cu_seqlens(list(request.bounds))
    whole = [[a, b, a, b] for a, b in pairwise(request.bounds) if a != document.start]
    query = document.end - TILE
    cut = _around(document.start, document.end, _Hidden(query, TILE, query - TILE, TILE))
    return _causal([*whole, *cut], request.total_seqlen)


@dataclass(frozen=True)
class _Hidden:
    """Keys that some queries do not see."""

    query: int
    """The first of them, as `key`."""
    num_queries: int
    key: int
    num_keys: int


def _around(start: int, end: int, hidden: _Hidden) -> list[list[int]]:
    """Rectangles of a document around what is hidden."""
    query, below = hidden.query, hidden.query + hidden.num_queries
    key, right = hidden.key, hidden.key + hidden.num_keys
    return [[start, query, start, query], [query, below, start, key],
            [query, below, right, below], [below, end, start, end]]  # fmt: skip


def _causal(parts: list[list[int]], total: int) -> AttnMask:
    """These rectangles, each up to the diagonal; empty ones are left out."""
    kept = [[*part, -total, 0] for part in parts if part[0] < part[1] and part[2] < part[3]]
    return AttnMask(np.array(kept, dtype=np.int32), total, total)
