"""The time of a short piece of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

TURNS = 5
"""Runs that are timed, after one that is not."""


def least_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of ``TURNS`` runs; the host waits for the device after each.

    A run before them builds and allocates. The result is above 0, so that a rate can be computed.
    """
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
