"""Packs of causal documents for the distributed benchmark, by distribution and seed.

`d1:3` is the pack of seed 3 with lengths of D1, and `d1:0-6` stands for seven packs:
  d1       short documents: lognormal (mu = ln 1200, sigma 1.1), clipped to 32..16384, rounded up
           to 8
  d2       long documents, as a published benchmark of context parallelism draws them: a histogram
           of thousands of tokens, without the bins that are longer than what is left; packs of one
           document are drawn again
  wlb, prolong: those of benchmarks/planner/plans.py
The last document is cut where the sequence ends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from benchmarks.planner.plans import packed_causal, sample_lengths
from megatron_magi import AttnMask
from megatron_magi.cli.parser import UsageError

D2_THOUSANDS = [0, 2, 4, 8, 16, 32, 64, 128, 256, 512]
D2_SHARES = [0.16, 0.05, 0.04, 0.06, 0.08, 0.21, 0.40, 0.20, 0.05]
PATTERN = re.compile(r"(d1|d2|wlb|prolong):(\d+)(?:-(\d+))?")


def short_documents(total: int, rng: np.random.Generator) -> list[int]:
    """D1."""
    lengths: list[int] = []
    left = total
    while left:
        drawn = float(np.clip(rng.lognormal(math.log(1200), 1.1), 32, 16384))
        lengths.append(min(-(-int(drawn) // 8) * 8, left))
        left -= lengths[-1]
    return lengths


def long_documents(total: int, rng: np.random.Generator) -> list[int]:
    """D2, two documents or more."""
    if total < 2:
        raise UsageError(f"packs of d2 need at least 2 tokens, got {total}; use more")
    lengths: list[int] = []
    while len(lengths) < 2:
        lengths, left = [], total
        while left:
            fits = [low * 1000 < left for low in D2_THOUSANDS[:-1]]
            shares = np.array(D2_SHARES) * fits
            i = int(rng.choice(len(shares), p=shares / shares.sum()))
            low, high = (1000 * edge for edge in D2_THOUSANDS[i : i + 2])
            lengths.append(min(int(rng.integers(max(low, 1), high)), left))
            left -= lengths[-1]
    return lengths


def _named(name: str) -> Callable[[int, np.random.Generator], list[int]]:
    own = {"d1": short_documents, "d2": long_documents}
    return own.get(name) or (lambda total, rng: sample_lengths(name, total, False, rng))


def packs(text: str) -> list[str]:
    """The names of packs that a word of the command line stands for; none: it names no packs."""
    match = PATTERN.fullmatch(text)
    if match is None:
        return []
    name, first, last = match.groups()
    return [f"{name}:{seed}" for seed in range(int(first), int(last or first) + 1)]


def pack(name: str, total: int) -> AttnMask:
    """The mask of one pack over ``total`` tokens; equal on every machine."""
    distribution, seed = name.split(":")
    rng = np.random.default_rng(int(seed))
    return packed_causal(_named(distribution)(total, rng))
