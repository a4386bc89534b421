"""Layouts of cross-attention, where queries and keys are not the same tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_magi.config import MagiConfig
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.mask.row_ranges import joined
from megatron_magi.core.native import solver
from megatron_magi.core.plan.token_layout import (
    USEFUL_CHUNKS,
    TokenLayout,
    contiguous_layout,
    num_local_tokens,
)


def query_layouts(
    mask: AttnMask, cp_size: int, config: MagiConfig, token_multiple: int
) -> Iterator[TokenLayout]:
    """Contiguous queries, and chunks that give every rank the same number of tiles.

    Neither looks at the keys' homes; a decoder's queries have the layout of its self-attention.
    """
    total = mask.total_seqlen_q
    num_local = num_local_tokens(total, cp_size, config, token_multiple)
    yield contiguous_layout(total, cp_size, config, token_multiple)
    chunk_size = config.chunk_size or _useful_chunk(num_local)
    costs = config.costs
    ranks = solver.dispatch_by_load(
        mask.slices, chunk_size, num_local * cp_size // chunk_size, cp_size, costs.tile_q,
        costs.tile_k,
    )  # fmt: skip
    yield TokenLayout(total, chunk_size, cp_size, ranks)


def key_layout_for(
    mask: AttnMask, queries: TokenLayout, config: MagiConfig, token_multiple: int
) -> TokenLayout:
    """Every chunk of keys on the rank that reads most of it, as far as ranks own equally many."""
    total, size = mask.total_seqlen_k, queries.cp_size
    num_local = num_local_tokens(total, size, config, token_multiple)
    chunk_size = config.chunk_size or _useful_chunk(num_local)
    num_chunks = num_local * size // chunk_size
    everything = np.array([[0, total]], np.int32)
    reads = np.zeros((size, num_chunks), np.int64)
    for rank in range(size):
        is_read = np.zeros(num_chunks * chunk_size, bool)
        for start, end in joined(
            queries.native.stage_slices(mask.slices, rank, everything)[:, 2:4]
        ).tolist():
            is_read[start:end] = True
        reads[rank] = is_read.reshape(num_chunks, chunk_size).sum(1)
    return TokenLayout(total, chunk_size, size, _most_read(reads))


def _most_read(reads: np.ndarray) -> np.ndarray:
    """int32 [num_chunks]: owners; chunks are given away by the rows that a rank reads of them."""
    size, num_chunks = reads.shape
    room = [num_chunks // size] * size
    owners = np.full(num_chunks, -1, np.int32)
    for place in np.argsort(-reads.T, axis=None, kind="stable").tolist():
        chunk, rank = divmod(place, size)
        if owners[chunk] < 0 and room[rank]:
            owners[chunk] = rank
            room[rank] -= 1
    return owners


def _useful_chunk(num_local: int) -> int:
    """The largest chunk size that gives a rank a useful number of chunks."""
    return next((num_local // n for n in USEFUL_CHUNKS if num_local % n == 0), 1)
