"""Functions for --mask."""

from typing import Any

from megatron_magi import AttnMask, masks


def prefixes(request: Any) -> AttnMask:
    """The first 4 tokens of every document see each other."""
    return masks.prefix_lm(request.bounds, [4] * (len(request.bounds) - 1))


def of_the_batch(request: Any) -> AttnMask:
    return masks.causal(len(request.batch["tokens"]))


def of_two(request: Any, frames: int) -> AttnMask:
    return masks.causal(request.total_seqlen)


def with_a_default(request: Any, frames: int = 2) -> AttnMask:
    return masks.causal(request.total_seqlen)


def of_half(request: Any) -> AttnMask:
    return masks.causal(request.total_seqlen // 2)


def no_mask(request: Any) -> int:
    return request.total_seqlen
