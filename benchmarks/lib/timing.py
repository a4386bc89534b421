"""Timing of one cell: every implementation in turn, round after round."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.lib.cell import Call

SPIN_CYCLES = 1_000_000  # 0.5 ms
WARM_MS = 30.0
FEWEST_ROUNDS = 3
MOST_DIFFERENCE = 0.02
"""Relative, in norm: bf16 kernels differ by less than half a percent; a wrong mask by tens."""


@dataclass(frozen=True)
class Budget:
    rounds: int
    cell_seconds: float
    spin_cycles: int = SPIN_CYCLES
    """Clocks for which the GPU waits before a call, so that the host is ahead of it."""

    def rounds_of(self, round_ms: float) -> int:
        """As many as asked for, fewer where a round takes long."""
        fitting = int(1000 * self.cell_seconds / max(round_ms, 1e-3))
        return max(FEWEST_ROUNDS, min(self.rounds, fitting))


@torch.no_grad()
def difference(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """Largest relative difference in norm of any output; inf where one has a nan."""

    def relative(a: Tensor, b: Tensor) -> float:
        norm = torch.linalg.vector_norm
        off = norm((a - b).float()) / norm(b.float()).clamp_min(1e-30)
        return float("inf") if off.isnan() else off.item()

    return max(relative(a, b) for a, b in zip(got, want, strict=True))


@dataclass(frozen=True)
class Ready:
    """An implementation in a cell: a call per input set, each of which has run."""

    calls: list[Call]
    outputs: tuple[Tensor, ...]
    """Of the first input set."""
    ms: float
    """Of the last call, roughly."""


def ready(calls: list[Call]) -> Ready:
    outputs = [call() for call in calls[:-1]]
    last, ms = _timed(calls[-1])
    return Ready(calls, (outputs or [last])[0], ms)


def _timed(call: Call) -> tuple[tuple[Tensor, ...], float]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    outputs = call()
    end.record()
    end.synchronize()
    return outputs, begin.elapsed_time(end)


def time_calls(cell: dict[str, Ready], budget: Budget) -> dict[str, list[float]]:
    """Milliseconds of every round, each in an order of its own: a drifting clock meets all alike,
    and nobody always runs behind the same one. The input sets take turns."""
    calls = {name: one.calls for name, one in cell.items()}
    round_ms = sum(one.ms for one in cell.values())
    for _ in range(int(WARM_MS / round_ms)):
        for sets in calls.values():
            sets[0]()
    torch.cuda.synchronize()
    return in_turn(calls, budget.rounds_of(round_ms), budget.spin_cycles)


def in_turn(
    calls: Mapping[str, Sequence[Callable[[], object]]], count: int, spin_cycles: int
) -> dict[str, list[float]]:
    """Milliseconds of every round; see time_calls. Nothing is warmed up here.

    Args:
        count: rounds.
        spin_cycles: see Budget.
    """
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for turn, name in rounds(list(calls), count):
        sets = calls[name]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(spin_cycles)  # the host runs ahead, so that its launch is not timed
        begin.record()
        sets[turn % len(sets)]()
        end.record()
        events[name].append((begin, end))
    torch.cuda.synchronize()
    return {n: [a.elapsed_time(b) for a, b in pairs] for n, pairs in events.items()}


def rounds(names: list[str], count: int) -> Iterator[tuple[int, str]]:
    """(round, name), every name once a round in a random order; the same in every run."""
    shuffled = random.Random(0)
    for turn in range(count):
        yield from ((turn, name) for name in shuffled.sample(names, len(names)))


def row(flops: float, times: list[float]) -> dict[str, float]:
    """The figures of a record's row."""
    ms = statistics.median(times)
    return {
        "tflops": round(flops / ms / 1e9, 1), "ms": round(ms, 4),
        "min_ms": round(min(times), 4), "max_ms": round(max(times), 4), "n": len(times),
    }  # fmt: skip
