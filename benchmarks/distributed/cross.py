"""Masks of the distributed benchmark whose keys have a home of their own, by name and tokens."""

from __future__ import annotations

from collections.abc import Callable

from megatron_magi import AttnMask

CLIPS = 8
"""Documents of `cross_text`: the rows of a video clip, which see the text of their own clip."""
SHARE_OF_TEXT = 4
SHARE_OF_QUERIES = 32


def _cross_text(tokens: int) -> AttnMask:
    """Video rows on the text of an encoder, a fourth as long; clips differ in length."""
    edges = [tokens * i * (i + 1) // (CLIPS * (CLIPS + 1)) for i in range(CLIPS + 1)]
    text = tokens // SHARE_OF_TEXT
    keys = [edge // SHARE_OF_TEXT for edge in edges]
    slices = [[edges[i], edges[i + 1], keys[i], keys[i + 1], -tokens, tokens] for i in range(CLIPS)]
    return AttnMask(slices, tokens, text)


def _few_queries(tokens: int) -> AttnMask:
    """Learned queries of a resampler: all see all keys."""
    queries = tokens // SHARE_OF_QUERIES
    return AttnMask([[0, queries, 0, tokens, -tokens, tokens]], queries, tokens)


CROSS_MASKS: dict[str, Callable[[int], AttnMask]] = {
    "cross_text": _cross_text,
    "few_queries": _few_queries,
}
