"""The time of a call of all ranks: that of the slowest one."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

HEAD_START_MS = 5.0
"""Of the host; ours needs less than 1 ms for a call, TransformerEngine more."""
CYCLES_PER_MS = 2_000_000


def timed(
    call: Callable[[], object], prepare: Callable[[], object], device: torch.device
) -> tuple[float, float]:
    """Milliseconds of the slowest rank and of its host; all begin together, once prepared."""
    prepare()
    together = torch.zeros(1, device=device)
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(HEAD_START_MS * CYCLES_PER_MS))
        dist.all_reduce(together)  # last: clocks differ, and with them the end of the sleep
        begin.record()
        began = time.perf_counter()
        call()
        host = time.perf_counter() - began
        end.record()
        end.synchronize()
        took = begin.elapsed_time(end)
    else:
        dist.all_reduce(together)
        began = time.perf_counter()
        call()
        host = time.perf_counter() - began
        took = 1e3 * host
    slowest = torch.tensor([took, 1e3 * host], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    ms, host_ms = slowest.tolist()
    return ms, host_ms


def nothing() -> None:
    """What a forward needs before it is timed."""
