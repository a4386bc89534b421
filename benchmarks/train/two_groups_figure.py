"""Draws two groups of runs: their losses, and how far each is from the mean of stock's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_magi.compare.differences import RunCurves
from megatron_magi.viz.curves_figure import smoothed
from megatron_magi.viz.style import INK, MUTED, new_figure, plain_panel, rank_colors

BROKEN = (0, (4, 2))
SHOWN = 1.5
"""The lower panel's height, in distances of right runs; a control leaves it."""


def two_groups_figure(
    stock: Sequence[RunCurves], magi: Sequence[RunCurves], controls: Sequence[RunCurves]
) -> Any:
    """Two panels over steps: stock solid, magi broken, controls red.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, (losses, gaps) = new_figure(2, 1, 8, 5, sharex=True, height_ratios=(3, 2))
    mean = np.mean([run.loss for run in stock], axis=0)
    widest = 0.0
    for run, style in _styles(stock, magi, controls):
        steps = np.arange(len(run.loss)) + run.first_iteration
        gap = 100 * smoothed(run.loss / mean[: len(run.loss)] - 1)
        losses.plot(steps, run.loss, label=run.name, **style)
        gaps.plot(steps, gap, **style)
        widest = widest if run in controls else max(widest, float(np.abs(gap).max()))
    gaps.set_ylim(-SHOWN * widest, SHOWN * widest)
    plain_panel(losses, "training loss", "nats per token")
    plain_panel(gaps, "difference from the mean of stock's runs, smoothed", "%")
    losses.legend(frameon=False, labelcolor=INK, fontsize=9)
    gaps.set_xlabel("step", color=MUTED)
    return figure


def _styles(
    stock: Sequence[RunCurves], magi: Sequence[RunCurves], controls: Sequence[RunCurves]
) -> list[tuple[RunCurves, dict[str, Any]]]:
    colors = rank_colors(len(stock) + len(magi))
    solid = [{"color": color, "linewidth": 1.6} for color in colors[: len(stock)]]
    broken = [{"color": c, "linewidth": 1.4, "linestyle": BROKEN} for c in colors[len(stock) :]]
    red = [{"color": "#cc2222", "linewidth": 1.4, "linestyle": ":"}] * len(controls)
    return [*zip([*stock, *magi, *controls], [*solid, *broken, *red], strict=True)]
