"""Times of training steps that several ranks take together."""

from __future__ import annotations

import faulthandler
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
STALLED_S = 60
"""After so many seconds in one step a rank writes where it is, once: writing it while code is being
compiled has ended a process by a segmentation fault."""


def timed(step: Callable[[], T], device: str) -> tuple[float, T]:
    """Milliseconds of the slowest rank, equal on all, and what this rank's step returned."""
    faulthandler.dump_traceback_later(STALLED_S)
    dist.barrier()
    _finish(device)
    began = time.perf_counter()
    result = step()
    _finish(device)
    faulthandler.cancel_dump_traceback_later()
    slowest = torch.tensor([1e3 * (time.perf_counter() - began)], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item(), result


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def figures(times: list[float], length: int) -> dict[str, float]:
    """Those of a record's row; times in milliseconds, of steps over ``length`` tokens."""
    ms = statistics.median(times)
    return {
        "ms": round(ms, 1), "min_ms": round(min(times), 1), "max_ms": round(max(times), 1),
        "n": len(times), "tokens_per_second": round(1e3 * length / ms),
    }  # fmt: skip
