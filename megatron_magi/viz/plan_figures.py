"""Pictures of a mask and its plan; every function returns a matplotlib Figure."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_magi.core.mask import AttnMask
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.plan.peer_rows import rows_between
from megatron_magi.viz.mask_drawing import draw_mask
from megatron_magi.viz.plan_facts import (
    NO_DOCUMENTS,
    LayoutFacts,
    Layouts,
    ring_rows,
)
from megatron_magi.viz.style import (
    GRID,
    INK,
    MAX_LEGEND,
    MUTED,
    counted,
    heading,
    new_figure,
    quarters,
    rank_colors,
    rank_ticks,
    short,
    title,
    token_ticks,
)

Drawn = dict[str, LayoutFacts]
"""The layouts that the mask has."""


def mask_figure(mask: AttnMask, text: str = "") -> Any:
    """The visible cells."""
    figure, axes = new_figure(1, 1, 4.6, 4.8)
    draw_mask(mask, axes)
    mask_axes(axes, mask)
    if text:
        title(axes, text)
    return figure


def shares_figure(layouts: Layouts, text: str) -> Any:
    """The mask in the color of each row's rank, one panel per layout, and the loads.

    Args:
        text: a sentence about the mask.
    """
    drawn = layouts_there(layouts)
    count = len(drawn)
    figure, panels = new_figure(
        1, count + 1, 4.6 * count + 3.6, 5.2, width_ratios=[1.0] * count + [0.72]
    )
    fill_shares(panels, drawn)
    absent = "".join(f"; {name}: - ({NO_DOCUMENTS})" for name in layouts if name not in drawn)
    heading(figure, text + absent)
    return figure


def layouts_there(layouts: Layouts) -> Drawn:
    """The layouts, without those that the mask does not have."""
    return {name: layout for name, layout in layouts.items() if layout is not None}


def fill_shares(panels: Any, drawn: Drawn) -> None:
    """Draw on given axes: one per layout for its mask, and the last one for all loads."""
    for axes, (name, layout) in zip(panels, drawn.items(), strict=False):
        colors = rank_colors(layout.cp_size)
        bands = [
            (int(start), int(end), colors[rank])
            for rank, ranges in enumerate(layout.row_ranges)
            for start, end in ranges
        ]
        draw_mask(layout.mask, axes, row_bands=bands)
        mask_axes(axes, layout.mask)
        title(axes, name)
    _rank_legend(panels[0], next(iter(drawn.values())).cp_size)
    _load_bars(panels[-1], drawn)


def traffic_figure(plan: AttnPlan) -> Any:
    """Key rows from rank to rank, and what a ring would move."""
    rows = rows_between(plan.transfers, plan.cp_size)
    cp_size = plan.cp_size
    figure, (axes, side) = new_figure(
        1, 2, max(8.5, 0.42 * cp_size + 5), max(4.2, 0.32 * cp_size + 1.8), width_ratios=[1.15, 1]
    )
    shown = np.ma.masked_where(np.eye(cp_size, dtype=bool), rows)
    most = max(int(rows.max()), 1)
    image = axes.imshow(shown, cmap="Blues", vmin=0, vmax=most)
    axes.set_facecolor("#e4e4e4")
    shows = {"ticks": quarters(most), "format": lambda v, _: short(v, most)}
    bar = figure.colorbar(image, ax=axes, shrink=0.85, **shows)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelcolor=MUTED)
    owned = plan.layout.num_local_tokens
    bar.set_label(f"{counted('rows', most)}; a rank owns {short(owned)}", color=MUTED)
    if cp_size <= 12:
        for (i, j), value in np.ndenumerate(rows):
            if i != j:
                color = "white" if value > 0.6 * most else INK
                axes.text(
                    j,
                    i,
                    short(float(value), most),
                    ha="center",
                    va="center",
                    color=color,
                    fontsize=8,
                )
    rank_ticks(axes, cp_size, "xy")
    axes.set_xlabel("to rank", color=MUTED)
    axes.set_ylabel("from rank", color=MUTED)
    title(axes, "Key rows sent")
    _received_bars(side, plan)
    return figure


def mask_axes(axes: Any, mask: AttnMask) -> None:
    """Ticks in tokens, and names of both axes."""
    token_ticks(axes, mask.total_seqlen_k, "x")
    token_ticks(axes, mask.total_seqlen_q, "y")
    axes.set_xlabel(counted("key", mask.total_seqlen_k), color=MUTED)
    axes.set_ylabel(counted("query", mask.total_seqlen_q), color=MUTED)


def _rank_legend(axes: Any, cp_size: int) -> None:
    if cp_size > MAX_LEGEND:
        return
    for rank, color in enumerate(rank_colors(cp_size)):
        axes.plot([], [], "s", color=color, markersize=8, label=f"rank {rank}")
    axes.legend(loc="upper right", frameon=False, labelcolor=INK, handletextpad=0.2)


def _load_bars(axes: Any, drawn: Drawn) -> None:
    """Load of every rank over the mean, a block of bars per layout."""
    cp_size = next(iter(drawn.values())).cp_size
    gap = 1.4 + 0.3 * cp_size
    means = {name: max(float(one.loads.mean()), 1e-9) for name, one in drawn.items()}
    top = max(1.0, *(float(one.loads.max()) / means[name] for name, one in drawn.items()))
    for block, (name, layout) in enumerate(drawn.items()):
        first = block * (cp_size + gap)
        loads = layout.loads / means[name]
        places = first + np.arange(cp_size)
        axes.barh(places, loads, height=0.86, color=rank_colors(cp_size))
        if cp_size <= 16:
            for place, load in zip(places, loads, strict=True):
                text_x = load if load < 0.75 else max(load, 1.0)  # clear of the line at 1
                axes.text(text_x + 0.02 * top, place, f"{load:.2f}", va="center", color=INK,
                          fontsize=8)  # fmt: skip
        axes.vlines(1.0, first - 0.5, first + cp_size - 0.5, INK, ":", linewidth=1)
        axes.annotate(
            f"{name}: max/mean {layout.imbalance:.3f}\n",
            (0, first - 0.6), va="bottom", fontweight="bold", color=INK, fontsize=10,
        )  # fmt: skip
        axes.annotate(_rows_text(layout), (0, first - 0.6), va="bottom", color=MUTED, fontsize=9)
    axes.set_xlim(0, top * 1.15)
    axes.set_ylim(len(drawn) * (cp_size + gap) - gap, -gap)
    axes.set_yticks([])
    axes.tick_params(length=0, labelcolor=MUTED)
    axes.set_xlabel("attention tiles of a rank / mean", color=MUTED)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(GRID)


def _rows_text(layout: LayoutFacts) -> str:
    """Mean key rows of a rank: those received, and those needed if that is another number."""
    total = layout.mask.total_seqlen_q
    means = layout.rows_received.mean(), layout.rows_needed.mean()
    received, needed = (short(mean, total) for mean in means)
    used = "all needed" if received == needed else f"needed {needed}"
    return f"key rows received: {received}, {used}; padding {short(layout.padding_tokens, total)}"


def _received_bars(axes: Any, plan: AttnPlan) -> None:
    received, ring = plan.rows_received, ring_rows(plan)
    axes.barh(range(plan.cp_size), [ring] * plan.cp_size, 0.7, color="#ececec")
    axes.barh(range(plan.cp_size), received, 0.7, color=rank_colors(plan.cp_size))
    share = received.sum() / (ring * plan.cp_size) if ring else 0.0
    rank_ticks(axes, plan.cp_size, "y")
    axes.set_ylim(plan.cp_size - 0.5, -0.5)
    axes.set_xticks(quarters(ring))
    axes.xaxis.set_major_formatter(lambda v, _: short(v, ring))
    axes.tick_params(length=0, labelcolor=MUTED)
    what = counted("key rows received", ring)
    axes.set_xlabel(f"{what}; grey: ring, all-gather", color=MUTED)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    title(axes, f"Received: {share:.1%} of a ring's rows")
