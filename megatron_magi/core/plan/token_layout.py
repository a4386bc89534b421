"""TokenLayout: which rank owns which chunk of the sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_magi.checks import INT32_MAX, instance, int_array, integer
from megatron_magi.config import MagiConfig
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.native import solver
from megatron_magi.core.plan.derived_cache import DerivedCache, cache_of

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

LayerMasks = tuple[tuple[AttnMask, int], ...]
"""The masks of one sequence in a model, each with its number of layers."""

PADDING_UNIT = 4096
"""If padding is needed, ranks are padded to a multiple of at most this many rows."""

LOAD_CAPS = (1.01, 1.02, 1.05)
"""Highest loads over the mean that are tried where a group spans nodes; elsewhere the first."""

USEFUL_CHUNKS = range(8, 65)
"""Numbers of chunks per rank that allow good balance and quick planning."""


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Equal chunks of the padded sequence, the same number on every rank.

    A rank's local order is its chunks in ascending order. Rows from ``total_seqlen`` to
    ``padded_seqlen`` are padding: they see nothing, and no row sees them.

    Raises:
        ValueError: chunk_ranks that do not give every rank the same number of chunks.
    """

    total_seqlen: int
    chunk_size: int
    """Rows per chunk."""
    cp_size: int
    chunk_ranks: Int32Array = field(repr=False)
    """int32 [num_chunks], read-only: owner of every chunk."""
    _kept: DerivedCache = field(default_factory=DerivedCache, repr=False)
    """Cache of device tables; it is no part of the value."""

    def __post_init__(self) -> None:
        for name, low in (("total_seqlen", 0), ("chunk_size", 1), ("cp_size", 1)):
            object.__setattr__(self, name, integer(getattr(self, name), name, low, INT32_MAX))
        ranks = _owners(self.chunk_ranks)
        ranks.setflags(write=False)
        object.__setattr__(self, "chunk_ranks", ranks)
        if len(ranks) == 0 or len(ranks) % self.cp_size:
            raise ValueError(
                f"chunk_ranks must hold a multiple of cp_size = {self.cp_size} chunks, got "
                f"{len(ranks)}; every rank owns the same number of chunks"
            )
        try:
            _ = self.native  # the solver checks the rest
        except ValueError as error:
            raise ValueError(
                f"{error}; pass ranks below cp_size, each as often, and a chunk_size that fits"
            ) from None
        object.__setattr__(self, "_kept", cache_of(self._kept, self.digest))

    @cached_property
    def native(self) -> solver.Layout:
        """The C++ form of this layout; its methods compute what depends on the owners alone."""
        return solver.Layout(*self._values)

    @property
    def _values(self) -> tuple[int, int, int, Int32Array]:
        return self.total_seqlen, self.chunk_size, self.cp_size, self.chunk_ranks

    @property
    def padded_seqlen(self) -> int:
        """Number of rows of all ranks together."""
        return len(self.chunk_ranks) * self.chunk_size

    @property
    def num_local_tokens(self) -> int:
        """Number of rows of one rank, padding included."""
        return self.padded_seqlen // self.cp_size

    def local_ranges(self, rank: int) -> Int32Array:
        """int32 [n, 2]: the rank's global rows as ascending runs, neighbouring chunks joined."""
        self.check_rank(rank)
        return self.native.local_ranges(rank)

    def position_ids(self, rank: int) -> Int64Array:
        """int64 [num_local_tokens]: the global row of every local row, padding rows included."""
        self.check_rank(rank)
        return self._rows(np.flatnonzero(self.chunk_ranks == rank))

    def permutation(self) -> Int64Array:
        """int64 [padded_seqlen]: ``position_ids`` of all ranks, one after another."""
        return self._rows(np.argsort(self.chunk_ranks, kind="stable"))

    def _rows(self, chunks: npt.NDArray[np.intp]) -> Int64Array:
        first = chunks.astype(np.int64)[:, None] * self.chunk_size
        return (first + np.arange(self.chunk_size)).reshape(-1)

    @cached_property
    def digest(self) -> int:
        """64-bit hash of everything above."""
        sizes = np.array([self.total_seqlen, self.chunk_size, self.cp_size], dtype=np.int64)
        return int(solver.hash64(sizes.tobytes() + self.chunk_ranks.tobytes()))

    def check_rank(self, rank: int) -> None:
        """Refuse a rank outside the group."""
        if not 0 <= integer(rank, "rank") < self.cp_size:
            raise ValueError(
                f"rank must be in [0, cp_size = {self.cp_size}), got {rank}; "
                f"pass the rank inside the context-parallel group"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLayout):
            return NotImplemented
        return self._values[:3] == other._values[:3] and np.array_equal(
            self.chunk_ranks, other.chunk_ranks
        )

    def __hash__(self) -> int:
        return self.digest

    def __reduce__(self) -> tuple[object, ...]:
        return TokenLayout, self._values


class Homes(NamedTuple):
    """Layouts of queries and keys; the same layout twice in self-attention."""

    queries: TokenLayout
    keys: TokenLayout


def _owners(chunk_ranks: npt.ArrayLike) -> Int32Array:
    owners = int_array(chunk_ranks, "chunk_ranks")
    if owners.ndim != 1 or (owners > INT32_MAX).any():
        raise ValueError(
            f"chunk_ranks must be one int32 row of owners, got {list(owners.shape)} up to "
            f"{owners.max(initial=0)}; pass a rank per chunk"
        )
    return np.ascontiguousarray(owners, dtype=np.int32)


def check_layout(value: object, name: str = "layout") -> None:
    """Refuse a value that is no TokenLayout."""
    instance(value, TokenLayout, name, "pass plan.layout of a plan")


def num_local_tokens(
    total_seqlen: int, cp_size: int, config: MagiConfig, token_multiple: int = 1
) -> int:
    """Number of rows of every rank: a function of lengths and config only, never of the mask.

    It is a multiple of ``token_multiple`` and of a fixed ``chunk_size``. Without a fixed chunk
    size, no row is added if the sequence divides evenly and a rank's share divides into 8 to 64
    chunks (or there is one rank). Otherwise ranks are padded up to a multiple of a power of two (at
    most 4096, at most 1/32 of the rank), so that even a prime length has chunks of useful sizes.
    """
    total_seqlen = integer(total_seqlen, "total_seqlen", 0)
    cp_size = integer(cp_size, "cp_size", 1)
    instance(config, MagiConfig, "config", "pass MagiConfig()")
    unit = math.lcm(integer(token_multiple, "token_multiple", 1), config.chunk_size or 1)
    per_rank, rest = divmod(total_seqlen, cp_size * unit)
    is_even = rest == 0 and (
        cp_size == 1 or any(per_rank * unit % count == 0 for count in USEFUL_CHUNKS)
    )
    if config.chunk_size is None and not is_even:
        per_rank = -(-total_seqlen // cp_size)
        padding = 1
        while padding < PADDING_UNIT and padding * 64 <= per_rank:
            padding *= 2
        unit = math.lcm(unit, padding)
    return max(1, -(-total_seqlen // (cp_size * unit))) * unit


def contiguous_layout(
    total_seqlen: int, cp_size: int, config: MagiConfig, token_multiple: int = 1
) -> TokenLayout:
    """One piece of the sequence for every rank, in order."""
    cp_size = integer(cp_size, "cp_size", 1)
    rows = num_local_tokens(total_seqlen, cp_size, config, token_multiple)
    return TokenLayout(total_seqlen, rows, cp_size, np.arange(cp_size, dtype=np.int32))


def check_chunk_size(chunk_size: int | None, total_seqlen: int, cp_size: int) -> None:
    """Refuse chunks so large that a rank would get none.

    Raises:
        ValueError: with the largest size that works.
    """
    if chunk_size is None or -(-total_seqlen // chunk_size) >= cp_size:
        return
    most = (total_seqlen - 1) // (cp_size - 1)
    remedy = f"use at most {most}, or None" if most else "with fewer tokens than ranks use None"
    raise ValueError(
        f"chunk_size must leave every one of {cp_size} ranks a chunk of the {total_seqlen} tokens, "
        f"got {chunk_size}; {remedy}"
    )


def choose_token_layout(
    masks: AttnMask | LayerMasks, cp_size: int, config: MagiConfig, token_multiple: int = 1
) -> TokenLayout:
    """Choose the chunk size and an owner for every chunk, by the tiles of all layers together.

    Raises:
        ValueError: a fixed chunk_size too large to give every rank a chunk.
    """
    layers = ((masks, 1),) if isinstance(masks, AttnMask) else masks
    total = layers[0][0].total_seqlen_q
    check_chunk_size(config.chunk_size, total, cp_size)
    trials = config.costs.swap_trials
    chunk_size, chunk_ranks = solver.solve_dispatch(
        [(mask.slices, num_layers) for mask, num_layers in layers],
        num_local_tokens=num_local_tokens(total, cp_size, config, token_multiple),
        cp_size=cp_size,
        chunk_size=-1 if config.chunk_size is None else config.chunk_size,
        tile_q=config.costs.tile_q,
        tile_k=config.costs.tile_k,
        max_imbalance_ppm=round(min(config.max_imbalance or LOAD_CAPS[0], cp_size) * 1e6),
        swap_trials=-1 if trials is None else trials,
        ranks_per_node=ranks_per_node(config, cp_size),
    )
    return TokenLayout(total, chunk_size, cp_size, chunk_ranks)


def ranks_per_node(config: MagiConfig, cp_size: int) -> int:
    """The context-parallel ranks of one node, or 0 if exchanges need not tell links apart: the cost
    table names no nodes, one node holds all ranks, or every rank has a node of its own.

    Raises:
        ValueError: nodes with different numbers of ranks.
    """
    per_node = config.costs.ranks_per_node
    if per_node is None or per_node == 1 or per_node >= cp_size:
        return 0
    if cp_size % per_node:
        raise ValueError(
            f"CostTable.ranks_per_node must divide the {cp_size} ranks of the context-parallel "
            f"group, got {per_node}; pass how many of its ranks share a node, or None"
        )
    return per_node
