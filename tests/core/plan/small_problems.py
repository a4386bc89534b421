"""Dispatch problems small enough to try every assignment: the oracle of the search's tests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from megatron_magi import AttnMask
from megatron_magi.core.plan.token_layout import choose_token_layout
from tests.knobs import magi_config

ROWS = 4
"""Rows of a chunk, one tile high; tiles are one key wide, so a load is a number of keys."""

OPEN = (-(2**31), 2**31 - 1)

Ints = npt.NDArray[np.int64]


@cache
def assignments(num_chunks: int, cp_size: int) -> Ints:
    """[n, num_chunks]: all ways to deal the chunks out evenly, ranks in order of first chunk."""
    per_rank = num_chunks // cp_size
    found: list[list[int]] = []

    def deal(ranks: list[int], rank: int) -> None:
        free = [c for c, r in enumerate(ranks) if r < 0]
        if not free:
            found.append(ranks)
            return
        for others in itertools.combinations(free[1:], per_rank - 1):
            mine = {free[0], *others}
            deal([rank if c in mine else r for c, r in enumerate(ranks)], rank + 1)

    deal([-1] * num_chunks, 0)
    return np.array(found)


@dataclass(frozen=True)
class SmallProblem:
    """Chunks that each read one or two random ranges of keys, whole."""

    seed: int
    num_chunks: int
    cp_size: int
    max_imbalance: float = 1.01

    @cached_property
    def mask(self) -> AttnMask:
        rng = np.random.default_rng(self.seed)
        total = self.num_chunks * ROWS
        slices = []
        for start in range(0, total, ROWS):
            ends = sorted(rng.choice(total + 1, int(rng.integers(2, 5)), replace=False).tolist())
            for k0, k1 in zip(ends[::2], ends[1::2], strict=False):
                slices.append((start, start + ROWS, k0, k1, *OPEN))
        return AttnMask(np.array(slices, np.int32), total, total)

    @cached_property
    def reads(self) -> npt.NDArray[np.bool_]:
        """[num_chunks, keys]"""
        return self.mask.to_dense()[::ROWS]

    @cached_property
    def chunk_loads(self) -> Ints:
        return self.reads.sum(1)

    @cached_property
    def cap(self) -> int:
        """Keys a rank may read: max_imbalance times the mean."""
        ppm = round(self.max_imbalance * 10**6)
        return int(self.chunk_loads.sum()) * ppm // (self.cp_size * 10**6)

    def highest_load(self, ranks: Ints) -> Ints:
        """Keys read by the fullest rank; for ranks [..., num_chunks]: [...]."""
        loads = [(ranks == r) @ self.chunk_loads for r in range(self.cp_size)]
        return np.max(loads, axis=0)

    def rows(self, ranks: Ints) -> Ints:
        """Rows that travel, counted row by row; for ranks [..., num_chunks]: [...]."""
        owned = np.repeat(np.eye(self.num_chunks, dtype=bool), ROWS, axis=1)
        held = [((ranks == r) @ (self.reads | owned)).sum(-1) for r in range(self.cp_size)]
        return np.sum(held, axis=0) - self.num_chunks * ROWS

    def owners(self, trials: int | None = None) -> Ints:
        """[num_chunks]: what the planner chooses."""
        config = magi_config(
            chunk_size=ROWS, tile_q=ROWS, tile_k=1, max_imbalance=self.max_imbalance,
            swap_trials=trials,
        )  # fmt: skip
        return choose_token_layout(self.mask, self.cp_size, config).chunk_ranks

    @cached_property
    def all_loads(self) -> Ints:
        return self.highest_load(assignments(self.num_chunks, self.cp_size))

    @property
    def share_under_cap(self) -> float:
        """Of all assignments, those the cap allows."""
        return float((self.all_loads <= self.cap).mean())

    def fewest_rows(self, cap: int) -> int:
        """Of all assignments under a cap."""
        allowed = assignments(self.num_chunks, self.cp_size)[self.all_loads <= cap]
        return int(self.rows(allowed).min())
