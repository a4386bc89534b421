"""Loss curves of runs, their differences from the baseline, those of rounding, and speed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_magi.compare.differences import Comparison, Curve
from megatron_magi.compare.noise_gates import Judged
from megatron_magi.viz.style import INK, MUTED, new_figure, plain_panel, rank_colors

FLOOR = 1e-9
"""Smaller differences are drawn here: a logarithmic axis has no zero."""
FAILED = "#c0392b"
BAND = "#9aa5b1"
LABEL_HEIGHT = 0.06
"""Least distance of two labels, as a part of a panel's height."""
SMALLEST = 1e-7
"""A band narrower than this many percent is drawn as if it were as wide."""
SMOOTHED_SHARE = 20
"""A smoothed curve is a mean over this part of the run (1/20), centred."""


def curves_figure(comparisons: list[Comparison]) -> Any:
    """Four panels; the first comparison is the baseline with itself."""
    figure, ((loss, speed), (loss_gap, norm_gap)) = new_figure(2, 2, 11, 6.4)
    colors = [INK, *rank_colors(max(len(comparisons) - 1, 2))]
    for i, c in enumerate(comparisons):
        style: dict[str, Any] = {"linewidth": 5, "alpha": 0.25} if i == 0 else {"linewidth": 1.4}
        style["color"] = colors[i] if c.passed or not i else FAILED
        if i and not c.passed:
            style["linestyle"] = (0, (4, 2))
        steps = np.arange(1, len(c.run.loss) + 1)
        verdict = "baseline" if i == 0 else ("PASS" if c.passed else "FAIL")
        loss.plot(steps, c.run.loss, label=f"{c.run.name} ({verdict})", **style)
        speed.plot(steps, c.run.tokens_per_second, **style)
        if i:
            loss_gap.plot(steps, np.maximum(c.loss_difference, FLOOR), **style)
            norm_gap.plot(steps, np.maximum(c.grad_norm_difference, FLOOR), **style)
    gates = comparisons[0].gates
    for axes, gate in ((loss_gap, gates.any_step_loss), (norm_gap, gates.any_step_grad_norm)):
        axes.axhline(gate, color=MUTED, linewidth=1, linestyle=":")
        axes.annotate("threshold", (0.01, gate), (0, 3), ("axes fraction", "data"),
                      textcoords="offset points", color=MUTED, fontsize=8)  # fmt: skip
        axes.set_yscale("log")
        axes.set_xlabel("step", color=MUTED)
    loss.legend(frameon=False, labelcolor=INK)
    speed.set_ylim(bottom=0)
    for axes, text in (
        (loss, "lm loss (nats per token)"),
        (speed, "tokens per second"),
        (loss_gap, "|loss / baseline - 1|"),
        (norm_gap, "|grad norm / baseline - 1|"),
    ):
        plain_panel(axes, text)
    return figure


@dataclass(frozen=True)
class _Line:
    """One line of a panel, labelled at its end."""

    name: str
    steps: Curve
    values: Curve
    style: dict[str, Any]


def noise_figure(runs: list[Judged], controls: list[Judged]) -> Any:
    """Two panels; steps that a run does not have are left out of its lines."""
    figure, (loss, gap) = new_figure(2, 1, 9, 7.2, sharex=True, height_ratios=(3, 2))
    every = [*runs, *controls]
    styles = _styles(runs, controls)
    longest = max(every, key=lambda j: len(j.difference))
    shown = {"color": INK, "linewidth": 5, "alpha": 0.25}
    name = f"{longest.baseline.name} (baseline)"
    baseline = _Line(name, _steps(longest), longest.baseline.loss, shown)
    pairs = list(zip(every, styles, strict=True))
    losses = [_Line(j.run.name, _steps(j), j.run.loss, style) for j, style in pairs]
    gaps = [_Line(j.run.name, _steps(j), 100 * smoothed(j.difference), s) for j, s in pairs]
    _draw_lines(loss, [baseline, *losses])
    _scale(gap, _draw_band(gap, longest), gaps)
    _draw_lines(gap, gaps)
    plain_panel(loss, "lm loss", "nats per token")
    plain_panel(gap, "loss / baseline - 1, smoothed, and the noise run's", "%")
    gap.set_xlabel("step", color=MUTED)
    return figure


def _styles(runs: list[Judged], controls: list[Judged]) -> list[dict[str, Any]]:
    """A color for each run that passes; red and broken for what fails or should fail."""
    wrong = {"color": FAILED, "linestyle": (0, (4, 2)), "linewidth": 1.4}
    colors = rank_colors(max(len(runs), 2))
    right = [{"color": color, "linewidth": 1.4} for color in colors]
    return [right[i] if j.passed else wrong for i, j in enumerate(runs)] + [wrong] * len(controls)


def smoothed(values: Curve) -> Curve:
    """Means over a twentieth of the run around each step; shorter at both ends."""
    reach = len(values) // SMOOTHED_SHARE // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    steps = np.arange(len(values))
    begin, end = np.maximum(steps - reach, 0), np.minimum(steps + reach + 1, len(values))
    return np.asarray((sums[end] - sums[begin]) / (end - begin))


def _draw_band(axes: Any, judged: Judged) -> float:
    """Draw the noise runs' smoothed mean |difference| around 0, once and twice; its maximum, %."""
    size, steps = 100 * smoothed(np.abs(judged.noise).mean(axis=0)), _steps(judged)
    for times, alpha in ((2, 0.25), (1, 0.45)):
        axes.fill_between(steps, -times * size, times * size, color=BAND, alpha=alpha, linewidth=0)
    middle = len(size) // 2
    axes.annotate(
        "|noise|, and twice that", (steps[middle], -2 * size[middle]), (0, -4),
        textcoords="offset points", ha="center", va="top", color=MUTED, fontsize=8,
    )  # fmt: skip
    axes.axhline(0, color=INK, linewidth=0.8)
    return max(2 * float(size.max()), SMALLEST)


def _scale(axes: Any, band: float, lines: list[_Line]) -> None:
    """Linear within the band, then logarithmic: a wrong run may be a thousand times off."""
    unit = _round_above(band)
    values = np.concatenate([line.values for line in lines])
    values = np.abs(values[np.isfinite(values)])
    largest = max(float(values.max()) if values.size else 0.0, unit)
    decades = [unit * 10**i for i in range(1 + math.ceil(math.log10(largest / unit)))]
    ticks = [unit / 2, *decades]
    axes.set_yscale("symlog", linthresh=unit, linscale=1.5)
    axes.set_yticks([-t for t in ticks] + [0, *ticks])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -unit), max(high, unit))  # shows the ticks of the linear part


def _round_above(x: float) -> float:
    """1, 2, 3 or 5 times a power of ten, at least x."""
    power = float(10.0 ** math.floor(math.log10(x)))
    return next(step * power for step in (1, 2, 3, 5, 10) if step * power >= x)


def _draw_lines(axes: Any, lines: list[_Line]) -> None:
    for line in lines:
        axes.plot(line.steps, line.values, **line.style)
    axes.autoscale_view()  # the heights below need the final limits
    for end in sorted({line.steps[-1] for line in lines}):
        _label([line for line in lines if line.steps[-1] == end], axes, end)


def _label(lines: list[_Line], axes: Any, end: float) -> None:
    """Label lines that end at the same step, with the names moved apart where they would touch."""
    to_height = axes.transData + axes.transAxes.inverted()

    def height(line: _Line) -> float:
        value = float(np.nan_to_num(line.values[-1], posinf=0.0, neginf=0.0))
        return float(to_height.transform((end, value))[1])

    place = -LABEL_HEIGHT
    top = 1 - LABEL_HEIGHT * len(lines)
    for line in sorted(lines, key=height):
        place = max(place + LABEL_HEIGHT, min(height(line), top))
        top += LABEL_HEIGHT
        axes.annotate(line.name, (end, place), (8, 0), ("data", "axes fraction"),
                      textcoords="offset points", color=line.style["color"], va="center",
                      fontsize=8, annotation_clip=False)  # fmt: skip


def _steps(judged: Judged) -> Curve:
    return np.arange(len(judged.difference), dtype=np.float64) + judged.run.first_iteration
