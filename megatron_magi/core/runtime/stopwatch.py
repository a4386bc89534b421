"""The time of a short piece of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

TURNS = 5


def least_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The least of a few runs in seconds, each waited for; one more comes first, which builds and
    allocates. Above 0, so that a rate follows from it."""
    times = []
    for _ in range(1 + TURNS):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - began)
    return max(min(times[1:]), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
