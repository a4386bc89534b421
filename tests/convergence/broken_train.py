"""Training with an error built in on purpose: negative controls of the convergence report.

    python tests/convergence/broken_train.py tile|partial RECIPE [section.key=value ...]

tile: one 128 x 128 tile of visible cells is missing from every sample's mask. partial: the first
context-parallel rank loses what the others send it for dk and dv. The third control, a moved
document boundary, is the recipe key data.moved_boundary.
"""

from __future__ import annotations

import sys
from functools import partial

import numpy as np

from megatron_magi.cli.train import run_rank
from megatron_magi.core.mask.mask import AttnMask
from megatron_magi.training.config import RunConfig
from megatron_magi.training.processes import Place, run_local
from megatron_magi.training.recipe import load_recipe

TILE = 128


def without_tile(mask: AttnMask) -> AttnMask:
    """The mask less the tile at the lower left of its largest slice, if that holds a whole one."""
    slices = mask.slices.tolist()
    sizes = [min(s[1] - s[0], s[3] - s[2]) for s in slices]
    at = int(np.argmax(sizes))
    q0, q1, k0, k1, low, high = slices[at]
    if q1 - q0 < 2 * TILE or k1 - k0 < 2 * TILE:
        return mask
    cut = q1 - TILE
    pieces = [[q0, cut, k0, k1, low, high], [cut, q1, k0 + TILE, k1, low, high]]
    kept = slices[:at] + pieces + slices[at + 1 :]
    return AttnMask(np.array(kept, dtype=np.int32), mask.total_seqlen_q, mask.total_seqlen_k)


def drop_tile() -> None:
    """Train with `without_tile` of every sample's mask."""
    from megatron_magi.training import microbatch

    whole = microbatch.sample_mask
    microbatch.sample_mask = lambda sample, config: without_tile(whole(sample, config))


def lose_partial() -> None:
    """On context-parallel rank 0, sums of dk and dv without what arrives."""
    from megatron.core import parallel_state

    from megatron_magi.core.runtime import dist_attn

    right = dist_attn.sum_at_home

    def wrong(own, arriving, dtype):
        if parallel_state.get_context_parallel_rank() == 0:
            for reduce in arriving:
                reduce.wait()
            arriving = []
        return right(own, arriving, dtype)

    dist_attn.sum_at_home = wrong


ERRORS = {"tile": drop_tile, "partial": lose_partial}


def broken_rank(error: str, config: RunConfig, place: Place) -> None:
    """One process of the run, with the error in it."""
    ERRORS[error]()
    run_rank(config, place)


def main(arguments: list[str]) -> int:
    error, recipe, *overrides = arguments
    config = load_recipe(recipe, overrides)
    processes = config.parallel.model_size * (config.parallel.dp or 1)
    return run_local(partial(broken_rank, error, config), processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
