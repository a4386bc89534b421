"""Training with an error built in on purpose: negative controls of the convergence report.

    python -m tests.convergence.broken_train ERROR RECIPE [section.key=value ...]

tile: one 128 x 128 tile of visible cells is missing from every sample's mask, in the shortest
document that has one; tile_of_longest: in the longest, whose rows see most else. partial: the first
context-parallel rank loses what the others send it for dk and dv. The third control, a moved
document boundary, is the recipe key data.moved_boundary. A run that would not be broken is refused:
a control that trains right shows nothing.
"""

from __future__ import annotations

import sys
from functools import partial

import numpy as np

from benchmarks.train.flag_rank import lose_gradients
from megatron_magi.cli.train import run_rank
from megatron_magi.core.mask.mask import AttnMask
from megatron_magi.training.process.processes import Place, run_local
from megatron_magi.training.recipe.recipe import load_recipe
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig

TILE = 128


def without_tile(mask: AttnMask, of_longest: bool = False) -> AttnMask:
    """The mask less one tile of a slice: its last rows, keys next to the diagonal.

    The slice is the smallest that has such a tile, whose rows see little else, or the largest.

    Raises:
        RecipeError: all cells of a tile must be visible, and no slice has one.
    """
    slices = mask.slices.tolist()
    sizes = [min(s[1] - s[0], s[3] - s[2]) for s in slices]
    order = np.argsort(sizes, kind="stable").tolist()
    for at in order[-1:] if of_longest else order:
        cut = _without_tile_of(mask, at)
        if mask.area() - cut.area() == TILE * TILE:
            return cut
    raise RecipeError(
        f"the tile control needs a sample with a document of about {2 * TILE} tokens, all of it "
        f"visible, got a largest slice of {max(sizes)} tokens; set a longer data.seq_length, or "
        f"data.mask=causal"
    )


def _without_tile_of(mask: AttnMask, at: int) -> AttnMask:
    """Without the tile of that slice, whole or not."""
    slices = mask.slices.tolist()
    q0, q1, k0, k1, low, high = slices[at]
    cut_q = max(q0, q1 - TILE)
    end = max(k0, min(k1, cut_q + high + 1))  # the last key that every row of the tile sees, and 1
    start = max(k0, end - TILE)
    above, left, right = [q0, cut_q, k0, k1], [cut_q, q1, k0, start], [cut_q, q1, end, k1]
    pieces = [[*p, low, high] for p in (above, left, right)]
    kept = slices[:at] + [p for p in pieces if p[0] < p[1] and p[2] < p[3]] + slices[at + 1 :]
    return AttnMask(np.array(kept, dtype=np.int32), mask.total_seqlen_q, mask.total_seqlen_k)


def drop_tile(of_longest: bool) -> None:
    """Train with `without_tile` of every sample's mask."""
    from megatron_magi.training.run import microbatch

    whole = microbatch.mask_of_documents
    microbatch.mask_of_documents = lambda *given: without_tile(whole(*given), of_longest)


ERRORS = {
    "tile": partial(drop_tile, False),
    "tile_of_longest": partial(drop_tile, True),
    "partial": lose_gradients,
}


def broken_rank(error: str, config: RunConfig, place: Place) -> None:
    """One process of the run, with the error in it."""
    ERRORS[error]()
    run_rank(config, place)


def check_breaks(error: str, config: RunConfig) -> None:
    """Raise RecipeError for a run that the error would not reach."""
    if config.attention != "magi":
        raise RecipeError(
            f"a negative control breaks attention=magi, got {config.attention}; leave it out"
        )
    if error == "partial" and config.parallel.cp == 1:
        raise RecipeError(
            "the partial control needs parallel.cp of 2 or more, got 1: nothing arrives there; "
            "set parallel.cp=2"
        )


def main(arguments: list[str]) -> int:
    error, recipe, *overrides = arguments
    try:
        config = load_recipe(recipe, overrides)
        check_breaks(error, config)
    except RecipeError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    processes = config.parallel.num_processes
    return run_local(partial(broken_rank, error, config), processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
