"""Masks of the kernel benchmark, by name and length (docs/design/forward_kernel.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_magi import AttnMask, masks

# Lognormal document lengths (mu = ln 1200, sigma 1.1, clipped to 32..16384).
SHORT_DOCS = {
    8192: [4845, 1560, 1174, 613],
    16384: [1348, 3880, 988, 903, 445, 1547, 1031, 1190, 721, 4331],
    32768: [
        *(6409, 496, 247, 392, 2599, 156, 1375, 1093, 318, 1733),
        *(1044, 1588, 1519, 841, 6021, 1696, 869, 3810, 562),
    ],
    65536: [
        *(774, 776, 955, 1051, 653, 278, 137, 508, 12563, 1112, 944, 1103, 318),
        *(2003, 537, 8178, 1211, 941, 328, 3102, 1317, 831, 836, 1053, 144, 480),
        *(2158, 4886, 4591, 32, 3367, 260, 1083, 1398, 2372, 187, 751, 2318),
    ],
}
# A corpus of long documents.
LONG_DOCS = {
    8192: [8192],
    16384: [758, 5086, 2451, 1925, 4105, 2051, 6, 1, 1],
    32768: [1801, 155, 27963, 1285, 809, 731, 17, 6, 1],
    65536: [486, 1638, 24006, 35973, 207, 3025, 107, 18, 46, 25, 3, 2],
}
BLOCK = 2048  # of packed_block_causal
WINDOW = 1024
ANSWERS = 16
SPARSE_BLOCK = 128  # of block_sparse
SPARSE_DENSITY = 0.2


def documents(table: dict[int, list[int]], seqlen: int) -> list[int]:
    """Lengths for this total: listed, or those of the nearest listed total scaled to fit."""
    if seqlen in table:
        return table[seqlen]
    base = min(table, key=lambda known: abs(known - seqlen))
    scaled = [max(1, length * seqlen // base) for length in table[base]]
    scaled[int(np.argmax(scaled))] += seqlen - sum(scaled)
    return scaled


def cu_seqlens(lengths: list[int]) -> list[int]:
    return np.cumsum([0, *lengths]).tolist()


@dataclass(frozen=True)
class Documents:
    """A mask as kernels for packed documents take it: each document alone, one rule for all."""

    lengths: list[int]
    causal: bool = False
    window: int | None = None
    """Most keys that a row sees, its own one included."""


def as_documents(name: str, seqlen: int) -> Documents | None:
    """None: this mask is not made of such documents."""
    whole, short = [seqlen], documents(SHORT_DOCS, seqlen)
    known = {
        "full": Documents(whole),
        "causal": Documents(whole, causal=True),
        "swa1024": Documents(whole, causal=True, window=WINDOW),
        "packed_full": Documents(short),
        "packed_causal": Documents(short, causal=True),
        "tiny64": Documents([64] * (seqlen // 64)),
    }
    return known.get(name)


@dataclass(frozen=True)
class BlockCausal:
    """packed_block_causal by blocks of queries, each with a first key and a number of keys."""

    cu_queries: list[int]
    first_keys: list[int]
    """One more than blocks; the last is the number of tokens."""
    num_keys: list[int]
    longest_query: int


def block_causal(seqlen: int) -> BlockCausal:
    queries, first, keys, at = [], [], [], 0
    for lengths in _blocks(seqlen):
        queries += lengths
        first += [at] * len(lengths)
        keys += np.cumsum(lengths).tolist()
        at += sum(lengths)
    return BlockCausal(cu_seqlens(queries), [*first, at], keys, max(queries))


def _blocks(seqlen: int) -> list[list[int]]:
    return [[min(BLOCK, n - at) for at in range(0, n, BLOCK)] for n in documents(LONG_DOCS, seqlen)]


def _shared_question(seqlen: int) -> AttnMask:
    sample = seqlen // 4  # a question of one half, four answers of one eighth each
    return masks.shared_question([sample // 2] * 4, [[sample // 8] * 4] * 4)


def _prefix_tree(seqlen: int) -> AttnMask:
    node = seqlen // 16  # a root of two nodes, seven inner ones, seven leaves
    return masks.prefix_tree(
        [2 * node] + [node] * 14, [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    )


def _answers(seqlen: int) -> AttnMask:
    """One prompt of a half, and answers that share it, as a step of GRPO has them."""
    answer = seqlen // 2 // ANSWERS
    return masks.prefix_tree([seqlen - ANSWERS * answer] + [answer] * ANSWERS, [-1] + [0] * ANSWERS)


def random_blocks(seqlen: int, block: int, density: float, seed: int = 0) -> AttnMask:
    """Square blocks, of which this share is visible."""
    count = -(-seqlen // block)
    blocks = np.random.default_rng(seed).random((count, count)) < density
    return masks.from_block_mask(blocks, block, seqlen)


MASKS: dict[str, Callable[[int], AttnMask]] = {
    "full": masks.full,
    "causal": masks.causal,
    "packed_full": lambda n: masks.from_cu_seqlens(
        cu_seqlens(documents(SHORT_DOCS, n)), causal=False
    ),
    "packed_causal": lambda n: masks.from_cu_seqlens(cu_seqlens(documents(SHORT_DOCS, n))),
    "swa1024": lambda n: masks.sliding_window(n, (WINDOW - 1, 0)),
    "packed_block_causal": lambda n: masks.block_causal(_blocks(n)),
    "tiny64": lambda n: masks.from_cu_seqlens(list(range(0, n + 1, 64)), causal=False),
    "shared_question": _shared_question,
    "prefix_tree": _prefix_tree,
    "answers16": _answers,
    "block_sparse": lambda n: random_blocks(n, SPARSE_BLOCK, SPARSE_DENSITY),
}
