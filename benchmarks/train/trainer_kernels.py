"""Which kernels a training step spends its time in: torch's profiler around one step."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

NUM_SHOWN = 40
GAPS_SHOWN = 12


def profile_last_step(config: Any, rank: int) -> None:
    """Let the last step of a run that starts after this write FOLDER/kernels.json on rank 0."""
    from megatron_magi.training.run import loop

    plain = loop.train_step

    def train_step(schedule: Any, streams: Any, dataset: Any, state: Any, *rest: Any) -> Any:
        step = (schedule, streams, dataset, state, *rest)
        if rank or state.iteration + 1 != config.train.iterations:
            return plain(*step)
        return _profiled(plain, step, config.folder / "kernels.json")

    loop.train_step = train_step


def _profiled(train_step: Any, step: tuple[Any, ...], path: Path) -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        result = train_step(*step)
        if on_gpu:
            torch.cuda.synchronize()
    path.write_text(json.dumps(summary(found.events(), on_gpu), indent=1) + "\n")
    return result


def summary(events: Any, on_gpu: bool) -> dict[str, Any]:
    """Milliseconds and calls by kernel, the longest first, and the share of time without one."""
    from torch.autograd import DeviceType

    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    mine = [e for e in events if e.device_type == kind]
    total: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in mine:
        total[event.name] += (event.time_range.end - event.time_range.start) / 1e3
        calls[event.name] += 1
    begin, end = min(e.time_range.start for e in mine), max(e.time_range.end for e in mine)
    longest = sorted(total, key=lambda name: -total[name])[:NUM_SHOWN]
    return {
        "span_ms": (end - begin) / 1e3,
        "busy_ms": busy_us([(e.time_range.start, e.time_range.end) for e in mine]) / 1e3,
        "kernels": [
            {"name": n[:120], "ms": round(total[n], 3), "calls": calls[n]} for n in longest
        ],
        "gaps": longest_gaps([(e.time_range.start, e.time_range.end, e.name) for e in mine]),
    }


def longest_gaps(ranges: list[tuple[float, float, str]]) -> list[dict[str, Any]]:
    """Where nothing ran: milliseconds, and the names around, the longest first."""
    gaps, reached, last = [], float("inf"), ""
    for begin, end, name in sorted(ranges):
        if begin > reached:
            idle = round((begin - reached) / 1e3, 3)
            gaps.append({"ms": idle, "after": last, "before": name[:60]})
        if end > reached or not last:
            reached, last = end, name[:60]
    return sorted(gaps, key=lambda gap: -gap["ms"])[:GAPS_SHOWN]


def busy_us(ranges: list[tuple[float, float]]) -> float:
    """Length of the union of time ranges."""
    busy, reached = 0.0, float("-inf")
    for begin, end in sorted(ranges):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy
