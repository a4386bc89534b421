"""Where the time of a training step goes, read from a trace of PyTorch's profiler.

Every instant of the step counts once: for the first kind of `KINDS` that runs then on any stream,
or for `idle`. So the parts add up to the step, and what is hidden under another kind is not seen;
`busy` has the time of a kind's own, hidden or not.
Waiting for another rank is `idle` where streams wait for flags, as with magi's symmetric memory,
and `exchange` where NCCL's kernels wait.
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = {
    "attention": r"\b(fwd|bwd|bwd_\w+|sink_gradient)_kernel\b|flash|fmha|sdpa|cudnn.*fort|thd_",
    "gemm": r"gemm|nvjet|cutlass|xmma|cublas|splitk",
    "elementwise": r".*",
    "exchange": r"nccl|memcpy (ptop|dtod)|\b(gather_rows|add_rows|pause)_kernel\b|symm|barrier",
}
"""What the name of a kernel or a copy says, in the order in which an instant is counted; the name
decides for `exchange` first, and `elementwise` is the rest: norms, rotary, loss, optimizer."""
ASKED_IN_ORDER = ("exchange", "attention", "gemm", "elementwise")
ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Span:
    """One kernel or copy on a GPU."""

    kind: str
    """One of `KINDS`."""
    begin: float
    """Microseconds."""
    end: float
    """Microseconds."""


def read_profile(path: Path) -> dict[str, Any]:
    """Milliseconds of the one step that a trace has.

    Args:
        path: a Chrome trace, .json.gz.

    Returns:
        `step_ms`; `parts_ms`, which add up to it; `busy_ms`.

    Raises:
        ValueError: the trace has not exactly one step.
    """
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    named = [event for event in events if event["name"].startswith("ProfilerStep")]
    steps = [event for event in named if event.get("cat") == "user_annotation"]
    if len(steps) != 1:
        raise ValueError(f"a trace must have one step, got {len(steps)} in {path.name}")
    begin, length = steps[0]["ts"], steps[0]["dur"]
    spans = [_span(x, begin, begin + length) for x in events if x.get("cat") in ON_THE_GPU]
    spans = [span for span in spans if span.end > span.begin]
    return {
        "step_ms": round(length / 1e3, 2),
        "parts_ms": {kind: round(us / 1e3, 2) for kind, us in _parts(spans, length).items()},
        "busy_ms": {kind: round(_union(spans, kind) / 1e3, 2) for kind in KINDS},
    }


def kind_of(name: str) -> str:
    """Which of `KINDS` a kernel belongs to."""
    return next(kind for kind in ASKED_IN_ORDER if re.search(KINDS[kind], name.lower()))


def _span(event: dict[str, Any], begin: float, end: float) -> Span:
    """The part of it that lies in the step."""
    last = min(event["ts"] + event["dur"], end)
    return Span(kind_of(event["name"]), max(event["ts"], begin), last)


def _parts(spans: list[Span], length: float) -> dict[str, float]:
    """Microseconds in which each kind is the first that runs."""
    edges = sorted(
        (time, change, span.kind)
        for span in spans
        for time, change in ((span.begin, 1), (span.end, -1))
    )
    running, parts, before = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0), 0.0
    for time, change, kind in edges:
        first = next((each for each in KINDS if running[each]), None)
        if first is not None:
            parts[first] += time - before
        running[kind] += change
        before = time
    return {**parts, "idle": length - sum(parts.values())}


def _union(spans: list[Span], kind: str) -> float:
    """Microseconds in which at least one of a kind runs."""
    return _parts([span for span in spans if span.kind == kind], 0.0)[kind]
