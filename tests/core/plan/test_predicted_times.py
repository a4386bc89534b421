"""Predicted kernel times of fixed masks: plans are made by them, so they belong to the planner's
version."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_magi import masks
from megatron_magi.core.native import solver

TIMED = {
    64: [1501165, 886489, 26441000],
    96: [2155595, 1270437, 37861794],
    128: [2684746, 1573683, 46886467],
    192: [3900861, 2288121, 67866770],
    256: [4961323, 2766318, 93658775],
}


@pytest.mark.parametrize("head_dim", TIMED)
def test_predicted_times_are_part_of_the_planner(head_dim):
    """Ranks get equal ones. Fails after a change of csrc/schedule that changes them: raise
    PLANNER_VERSION, then write the new times here."""
    clock = solver.KernelClock(8, 2, head_dim, 132)
    lengths = [1 + 41 * (i * i * i % 127) for i in range(1, 30)]
    tokens = sum(lengths)
    seen = [
        masks.from_cu_seqlens([0, *np.cumsum(lengths)]),
        masks.sliding_window(tokens, (1000, 0)),
        masks.causal(tokens),
    ]
    assert [clock.time(mask.slices, tokens, tokens) for mask in seen] == TIMED[head_dim]
