"""What ranks run for test_bench_dist_flash.py."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

from megatron_magi import AttnMask, HeadShape

HERE = Path(__file__).parent


def whole_sequence(
    rank: int, method: str, mask: AttnMask, heads: HeadShape
) -> tuple[torch.Tensor, ...] | None:
    """q, k, v and dout of the problem, and (out, dq, dk, dv) on the stand-in; of rank 0."""
    for folder in (HERE / "flash_stand_in", HERE.parents[1] / "scripts"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    from bench_dist_attn import RIVALS
    from bench_dist_calls import Problem
    from bench_dist_flash import FlashKernel

    x = Problem.random(mask, heads, torch.empty(0, dtype=torch.float64))
    call = RIVALS[method](dataclasses.replace(x, flash=FlashKernel(mask)))
    timed = call.forward()[0]
    assert timed.shape[0] == call.backward()[0].shape[0]
    full = call.full()
    assert full is not None
    return (x.q, x.k, x.v, x.dout, *full) if rank == 0 else None
