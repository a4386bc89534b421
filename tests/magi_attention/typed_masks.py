"""Type-coded masks cell by cell, as MagiAttention defines the types; only the names are ours."""

from __future__ import annotations

import random

import numpy as np

from megatron_magi.magi_attention import AttnMaskType, AttnRange, AttnRanges

Typed = tuple[AttnRanges, AttnRanges, list[AttnMaskType]]


def visible(kind: AttnMaskType, i: int, j: int, num_rows: int, num_keys: int) -> bool:
    """Row i, key j of a slice, d = keys - rows."""
    below = j <= i + num_keys - num_rows
    return {
        AttnMaskType.FULL: True,
        AttnMaskType.CAUSAL: below,
        AttnMaskType.INVCAUSAL: j >= i,
        AttnMaskType.BICAUSAL: j >= i and below,
    }[kind]


def count_cells(typed: Typed, num_q: int, num_k: int) -> np.ndarray:
    """int [num_q, num_k]: how many slices show each cell; more than one is an error."""
    counts = np.zeros((num_q, num_k), dtype=int)
    for q, k, kind in zip(*typed, strict=True):
        for i in range(q.seqlen):
            for j in range(k.seqlen):
                counts[q.start + i, k.start + j] += visible(kind, i, j, q.seqlen, k.seqlen)
    return counts


def random_typed(seed: int, length: int, max_slices: int = 6) -> Typed:
    """Random slices of any type over one sequence, those that would share a cell left out."""
    rng = random.Random(seed)
    kept: Typed = (AttnRanges(), AttnRanges(), [])
    total = np.zeros((length, length), dtype=int)
    for _ in range(rng.randint(1, max_slices)):
        q, k = (sorted((rng.randint(0, length), rng.randint(0, length))) for _ in range(2))
        one: Typed = (AttnRanges.from_ranges([q]), AttnRanges.from_ranges([k]),
                      [rng.choice(list(AttnMaskType))])  # fmt: skip
        with_it = total + count_cells(one, length, length)
        if with_it.max(initial=0) <= 1:
            total = with_it
            kept[0].append(AttnRange(*q))
            kept[1].append(AttnRange(*k))
            kept[2].extend(one[2])
    return kept
