"""What ranks run for test_flash.py."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

from megatron_magi import AttnMask, HeadShape

STAND_IN = str(Path(__file__).parent / "flash_stand_in")


def whole_sequence(
    rank: int, method: str, mask: AttnMask, heads: HeadShape
) -> tuple[torch.Tensor, ...] | None:
    """q, k, v and dout of the problem, and (out, dq, dk, dv) on the stand-in; of rank 0."""
    if STAND_IN not in sys.path:
        sys.path.insert(0, STAND_IN)
    from benchmarks.distributed.attn import RIVALS
    from benchmarks.distributed.calls import Problem
    from benchmarks.distributed.flash import FlashKernel

    x = Problem.random(mask, heads, torch.empty(0, dtype=torch.float64))
    call = RIVALS[method](dataclasses.replace(x, flash=FlashKernel(mask)))
    timed = call.forward()[0]
    assert timed.shape[0] == call.backward()[0].shape[0]
    full = call.full()
    assert full is not None
    return (x.q, x.k, x.v, x.dout, *full) if rank == 0 else None
