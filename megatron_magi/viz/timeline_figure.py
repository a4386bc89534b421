"""The modelled time line of a plan's stages as a picture."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_magi.core.plan import AttnPlan, predict_times
from megatron_magi.viz.plan_facts import forward_stage_rows
from megatron_magi.viz.style import (
    GRID,
    INK,
    MUTED,
    counted,
    new_figure,
    rank_colors,
    rank_ticks,
    short,
    text_color,
    title,
)

COMPUTE_Y, COMPUTE_HEIGHT = -0.16, 0.42
RECEIVE_Y, RECEIVE_HEIGHT = 0.26, 0.24
RECEIVE_COLOR = "#b9bec6"
MAX_LABELLED_RANKS = 16


def timeline_figure(plan: AttnPlan) -> Any:
    """Every rank's stages as the planner predicts them, with what overlaps."""
    times = predict_times(plan)
    end = times.forward_us or 1.0
    colors = rank_colors(plan.cp_size)
    labelled = plan.cp_size <= MAX_LABELLED_RANKS
    figure, axes = new_figure(1, 1, 10, max(2.6, 0.5 * plan.cp_size + 1.4))
    stage_rows = forward_stage_rows(plan)
    for (rank, stage), rows in np.ndenumerate(stage_rows):
        what = "own keys" if stage == 0 and rows == 0 else f"stage {stage}"
        receive, compute = times.forward[rank, stage].reshape(2, 2).tolist()
        _bar(axes, (rank + COMPUTE_Y, COMPUTE_HEIGHT), compute, colors[rank],
             what if labelled else "", end)  # fmt: skip
        _bar(axes, (rank + RECEIVE_Y, RECEIVE_HEIGHT), receive, RECEIVE_COLOR,
             short(float(rows), float(stage_rows.max())) if labelled else "", end)  # fmt: skip
    _axes(axes, plan, end)
    title(
        axes,
        f"Stages: attention (colored) while {counted('key rows', stage_rows.max())} arrive (grey); "
        f"{1 - times.exposed_share:.0%} of the transfer time hides",
    )
    return figure


def _bar(
    axes: Any,
    row: tuple[float, float],
    span: list[float],
    color: Any,
    text: str,
    end: float,
) -> None:
    """``row``: middle and height; ``span``: begin and end in microseconds, of ``end`` in all."""
    (y, height), (start, stop) = row, span
    axes.barh(y, stop - start, height, start, color=color, edgecolor="white", linewidth=1)
    if text and stop - start > 0.006 * end * (len(text) + 2):
        ink = INK if color == RECEIVE_COLOR else text_color(color)
        axes.text((start + stop) / 2, y, text, ha="center", va="center", color=ink, fontsize=7.5)


def _axes(axes: Any, plan: AttnPlan, end: float) -> None:
    rank_ticks(axes, plan.cp_size, "y")
    axes.set_ylim(plan.cp_size - 0.4, -0.6)
    axes.set_xlim(0, end * 1.01)
    axes.set_ylabel("rank", color=MUTED)
    c = plan.config.costs
    axes.set_xlabel(
        f"microseconds of one layer's forward, modelled: {c.link_gib_s:g} GiB/s per rank, "
        f"{c.kernel_tflops:g} TFLOP/s, {c.stage_latency_us:g} us a stage",
        color=MUTED,
    )
    axes.spines["bottom"].set_visible(True)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
