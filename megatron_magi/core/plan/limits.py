"""Limits on the planner's input, so that planning takes at most about a minute and 4 GB.

Measured on one core. The search and the list of transfers grow with chunks times ranks, a rank's
view with the square of its chunks, and the counts of tiles with the tiles that slices touch.
"""

from __future__ import annotations

from megatron_magi.config import MagiConfig
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.plan.token_layout import USEFUL_CHUNKS, TokenLayout, num_local_tokens

MAX_CP_SIZE = 2**13
MAX_CHUNKS = 2**16
MAX_CHUNKS_PER_RANK = 2**13
MAX_CHUNKS_TIMES_RANKS = 2**26
MAX_SLICES_TIMES_RANKS = 2**30
MAX_TILES_OF_SLICES = 2**24
MAX_TRIALS = 10**8
MAX_TOKENS = 2**30
"""The limit includes padding; positions are int32."""


class PlanSizeError(ValueError):
    """A problem that would take the planner minutes or gigabytes."""


def max_chunks_per_rank(cp_size: int) -> int:
    """The most chunks that each of ``cp_size`` ranks may have."""
    return min(MAX_CHUNKS_PER_RANK, MAX_CHUNKS // cp_size, MAX_CHUNKS_TIMES_RANKS // cp_size**2)


def check_size(
    mask: AttnMask,
    cp_size: int,
    config: MagiConfig,
    layout: TokenLayout | None,
    token_multiple: int,
    key_layout: TokenLayout | None = None,
) -> None:
    """Refuse a problem that would take longer than about a minute, before planning starts.

    Raises:
        PlanSizeError: too many chunks, slices or trials; the message names the least chunk size.
    """
    chunk_size = _check_tokens(mask.total_seqlen_q, cp_size, config, layout, token_multiple)
    if key_layout is not None or mask.total_seqlen_k != mask.total_seqlen_q:
        _check_tokens(mask.total_seqlen_k, cp_size, config, key_layout, token_multiple)
    _check_slices(mask, cp_size, min(chunk_size, config.costs.tile_q))
    trials = config.costs.swap_trials or 0
    if trials > MAX_TRIALS:
        raise PlanSizeError(
            f"CostTable.swap_trials must be at most {MAX_TRIALS:,}, got {trials:,}; "
            f"leave it out for a budget that grows with the chunks"
        )


def _check_tokens(
    total: int, cp_size: int, config: MagiConfig, layout: TokenLayout | None, token_multiple: int
) -> int:
    """Check the tokens and chunks of one sequence; returns the chunk size."""
    if layout is None:
        num_local = num_local_tokens(total, cp_size, config, token_multiple)
        # For None the planner may choose any divisor that gives a rank at most USEFUL_CHUNKS[-1].
        chunk_size = config.chunk_size or -(-num_local // USEFUL_CHUNKS[-1])
    else:
        num_local, chunk_size = layout.num_local_tokens, layout.chunk_size
    if num_local * cp_size > MAX_TOKENS:
        raise PlanSizeError(
            f"a plan takes at most {MAX_TOKENS:,} tokens, padding included, got "
            f"{num_local * cp_size:,} for a sequence of {total:,} with "
            f"MagiConfig.chunk_size {config.chunk_size} and token_multiple {token_multiple}; use a "
            f"smaller chunk_size or token_multiple, or a shorter sequence"
        )
    _check_chunks(total, cp_size, config, -(-num_local // chunk_size))
    return chunk_size


def _check_chunks(total: int, cp_size: int, config: MagiConfig, num_chunks: int) -> None:
    """``num_chunks`` is a rank's number of chunks, or the most that the planner may choose."""
    most = max_chunks_per_rank(cp_size)
    if num_chunks <= most:
        return
    least = -(-total // (cp_size * most))
    got = "none, which may choose" if config.chunk_size is None else f"{config.chunk_size:,} for"
    raise PlanSizeError(
        f"{cp_size:,} ranks may have at most {most:,} chunks each (planning takes minutes and "
        f"gigabytes beyond), got MagiConfig.chunk_size {got} {num_chunks:,}; use a chunk_size of "
        f"at least {least:,} for these {total:,} tokens, or fewer ranks"
    )


def _check_slices(mask: AttnMask, cp_size: int, block: int) -> None:
    if mask.num_slices * cp_size > MAX_SLICES_TIMES_RANKS:
        raise PlanSizeError(
            f"slices of the mask times ranks must be at most {MAX_SLICES_TIMES_RANKS:,}, got "
            f"{mask.num_slices:,} x {cp_size:,}; join documents, or use fewer ranks"
        )
    starts, ends = mask.slices[:, 0] // block, (mask.slices[:, 1] - 1) // block
    touched = int((ends.astype("int64") - starts + 1).sum())
    if touched > MAX_TILES_OF_SLICES:
        raise PlanSizeError(
            f"the mask's slices may touch at most {MAX_TILES_OF_SLICES:,} tiles of {block:,} query "
            f"rows together, got {touched:,}; use larger tiles or chunks, fewer tokens or slices"
        )
