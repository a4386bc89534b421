"""Loss curves, and below how far each run is from the reference beside what rounding does."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_magi.training.compare import Curve
from megatron_magi.training.noise_gates import Judged
from megatron_magi.viz.style import GRID, INK, MUTED, new_figure, rank_colors, title

FAILED = "#c0392b"
BAND = "#9aa5b1"
SMOOTHED_SHARE = 20
"""A smoothed curve is a mean over this part of the run (1/20), centred."""


def noise_figure(runs: list[Judged], controls: list[Judged]) -> Any:
    """Two panels; steps that a run does not have are left out of its lines."""
    figure, (loss, gap) = new_figure(2, 1, 9, 7.2, sharex=True, height_ratios=(3, 2))
    every = [*runs, *controls]
    longest = max(every, key=lambda j: len(j.difference))
    _line(loss, longest, longest.reference.loss, {"color": INK, "linewidth": 5, "alpha": 0.25})
    unit = _draw_band(gap, longest)
    colors = rank_colors(max(len(every), 2))
    for i, judged in enumerate(every):
        is_control = i >= len(runs)
        style: dict[str, Any] = {"linewidth": 1.4, "color": colors[i]}
        if is_control or not judged.passed:
            style |= {"color": FAILED, "linestyle": (0, (4, 2))}
        _line(loss, judged, judged.run.loss, style)
        _line(gap, judged, 100 * smoothed(judged.difference), style)
    _label_ends(loss, [(longest, longest.reference.loss, INK, "reference")] + [
        (j, j.run.loss, _ink(j, runs, colors, every), "") for j in every])  # fmt: skip
    _label_ends(gap, [(j, 100 * smoothed(j.difference), _ink(j, runs, colors, every), "")
                      for j in every])  # fmt: skip
    # Differences of a wrong run may be a thousand times the noise: linear up to it, then decades.
    gap.set_yscale("symlog", linthresh=unit)
    _finish(loss, "lm loss", "nats per token")
    _finish(gap, "loss / reference - 1, smoothed, beside the noise run's", "%")
    gap.set_xlabel("step", color=MUTED)
    return figure


def smoothed(values: Curve) -> Curve:
    """Means over a twentieth of the run around each step; shorter at both ends."""
    reach = len(values) // SMOOTHED_SHARE // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    steps = np.arange(len(values))
    begin, end = np.maximum(steps - reach, 0), np.minimum(steps + reach + 1, len(values))
    return np.asarray((sums[end] - sums[begin]) / (end - begin))


def _draw_band(axes: Any, judged: Judged) -> float:
    """The noise run's smoothed |difference| on both sides of 0, once and twice; its largest, %."""
    size = 100 * smoothed(np.abs(judged.noise))
    for times, alpha in ((2, 0.25), (1, 0.45)):
        axes.fill_between(_steps(judged, size), -times * size, times * size, color=BAND,
                          alpha=alpha, linewidth=0)  # fmt: skip
    where = len(size) // 2
    axes.annotate("|noise|, and twice that", (_steps(judged, size)[where], -2 * size[where]),
                  (0, -4), textcoords="offset points", ha="center", va="top", color=MUTED,
                  fontsize=8)  # fmt: skip
    axes.axhline(0, color=INK, linewidth=0.8)
    return max(2 * float(size.max()), 1e-7)


def _steps(judged: Judged, values: Curve) -> Curve:
    return np.arange(len(values), dtype=np.float64) + judged.run.first_iteration


def _line(axes: Any, judged: Judged, values: Curve, style: dict[str, Any]) -> None:
    axes.plot(_steps(judged, values), values, **style)


def _ink(judged: Judged, runs: list[Judged], colors: list[Any], every: list[Judged]) -> Any:
    is_right = judged.passed and any(judged is run for run in runs)
    return colors[next(i for i, j in enumerate(every) if j is judged)] if is_right else FAILED


def _label_ends(axes: Any, lines: list[tuple[Judged, Curve, Any, str]]) -> None:
    """Each line's name at its end, above one another in the order of the ends."""
    ordered = sorted(lines, key=lambda line: float(np.nan_to_num(line[1][-1])))
    for place, (judged, values, color, word) in enumerate(ordered):
        name = f"{judged.reference.name} (reference)" if word else judged.run.name
        end = (_steps(judged, values)[-1], np.nan_to_num(values[-1]))
        offset = 11 * (place - (len(ordered) - 1) / 2)
        axes.annotate(name, end, (8, offset), textcoords="offset points", color=color,
                      va="center", fontsize=8, annotation_clip=False)  # fmt: skip


def _finish(axes: Any, heading: str, unit: str) -> None:
    title(axes, heading)
    axes.set_ylabel(unit, color=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelcolor=MUTED)
