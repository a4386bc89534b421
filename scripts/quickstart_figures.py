"""The quick start's two pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from megatron_magi import HeadShape, masks
from megatron_magi.core.plan import AttnPlan, DispatchPlan, make_attn_plan
from megatron_magi.training.compare import Comparison
from megatron_magi.training.config import DataConfig, RunConfig
from megatron_magi.training.data import PackedDataset, sample_mask

INK, MUTED, GRID = "#222222", "#666666", "#d8d8d8"
RUN_COLORS = ("#222222", "#1f77b4", "#d62728")
RANK_COLORS = (
    "#2f6db3",
    "#e08a2b",
    "#3c9d6b",
    "#b8476b",
    "#7a5bb0",
    "#8c6d3f",
    "#4aa3b5",
    "#999933",
)
PICTURE_CP, PICTURE_TOKENS = 4, 32768
TINY = 1e-9


def draw_losses(comparisons: list[Comparison], folder: Path) -> Path:
    """Loss curves of the runs above, their difference from the reference below."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    labels = (
        "reference: dense attention, CP 1",
        "megatron_magi, CP 2",
        "one document boundary moved by a token",
    )
    styles: tuple[dict[str, Any], ...] = (
        {"linewidth": 5, "alpha": 0.25},
        {"linewidth": 1.6},
        {"linewidth": 1.2, "linestyle": (0, (4, 3))},
    )
    for c, label, color, style in zip(comparisons, labels, RUN_COLORS, styles, strict=True):
        steps = np.arange(1, len(c.run.loss) + 1)
        top.plot(steps, c.run.loss, label=label, color=color, **style)
        if c is not comparisons[0]:
            bottom.plot(steps, np.maximum(c.loss_difference, TINY), color=color, **style)
    gates = comparisons[0].gates
    bottom.axhline(gates.any_step_loss, color=MUTED, linewidth=1, linestyle=":")
    bottom.annotate(
        "gate",
        (1.0, gates.any_step_loss),
        (4, 0),
        ("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        color=MUTED,
        fontsize=9,
    )
    top.set_ylabel("lm loss (nats per token)")
    top.legend(frameon=False)
    top.set_title("Same training, half the sequence per rank", loc="left", color=INK)
    bottom.set_yscale("log")
    bottom.set_ylabel("|loss / reference - 1|")
    bottom.set_xlabel("iteration")
    _clean(top, bottom)
    return _save(figure, folder / "loss.png")


def draw_shares(config: RunConfig, folder: Path) -> Path:
    """One packed sample of the corpus: each rank's share under zigzag and under our dispatch."""
    data = DataConfig(path=config.data.path, seq_length=PICTURE_TOKENS, prefetch=0)
    sample = PackedDataset(data, config.train.seed)[0]
    mask, heads = sample_mask(sample, data), HeadShape(32, 8, 64)
    plans = {
        "zigzag": make_attn_plan(mask, PICTURE_CP, heads, config.magi, dispatch=_zigzag()),
        "megatron_magi": make_attn_plan(mask, PICTURE_CP, heads, config.magi),
    }
    figure, axes = plt.subplots(
        1, 3, figsize=(13, 5), width_ratios=(1, 1, 0.62), layout="constrained"
    )
    for axis, (name, plan) in zip(axes, plans.items(), strict=False):
        masks.draw_mask(mask, axis, row_bands=_row_bands(plan))
        axis.set_title(f"{name}", loc="left", color=INK, fontweight="bold")
        ticks = range(0, PICTURE_TOKENS + 1, PICTURE_TOKENS // 4)
        labels = [f"{t // 1024}K" if t else "0" for t in ticks]
        axis.set_xticks(ticks, labels)
        axis.set_yticks(ticks, labels)
        axis.tick_params(length=0, labelcolor=MUTED)
        axis.spines[:].set_color(GRID)
        axis.set_xlabel("key", color=MUTED)
    axes[0].set_ylabel("query", color=MUTED)
    axes[1].set_ylabel("")
    _label_ranks(axes[0])
    _draw_loads(axes[2], plans)
    figure.suptitle(
        f"One packed sample, {PICTURE_TOKENS // 1024}K tokens, {len(sample.cu_seqlens) - 1} "
        f"documents, causal inside each: who computes what on {PICTURE_CP} ranks",
        x=0.012,
        y=1.07,
        ha="left",
        color=INK,
    )
    return _save(figure, folder / "mask.png")


def _zigzag() -> DispatchPlan:
    """The usual layout: 2 * cp chunks, rank r owns chunk r from the front and from the back."""
    ranks = [*range(PICTURE_CP), *reversed(range(PICTURE_CP))]
    chunk = PICTURE_TOKENS // len(ranks)
    return DispatchPlan(PICTURE_TOKENS, chunk, PICTURE_CP, np.array(ranks, dtype=np.int32))


def _row_bands(plan: AttnPlan) -> list[tuple[int, int, Any]]:
    return [
        (int(start), int(end), RANK_COLORS[rank])
        for rank in range(plan.cp_size)
        for start, end in plan.dispatch.local_ranges(rank)
    ]


def _label_ranks(axis: Any) -> None:
    for rank in range(PICTURE_CP):
        axis.plot([], [], "s", color=RANK_COLORS[rank], markersize=9, label=f"rank {rank}")
    axis.legend(loc="upper right", frameon=False, labelcolor=INK, handletextpad=0.2)


def _draw_loads(axis: Any, plans: dict[str, AttnPlan]) -> None:
    """Load of every rank over the mean, a block of bars per plan."""
    top = max(float(plan.loads.max() / plan.loads.mean()) for plan in plans.values())
    for block, (name, plan) in enumerate(plans.items()):
        first = block * (PICTURE_CP + 2.2)
        loads = plan.loads / plan.loads.mean()
        positions = first + np.arange(PICTURE_CP)
        axis.barh(positions, loads, height=0.86, color=RANK_COLORS[:PICTURE_CP])
        for position, load in zip(positions, loads, strict=True):
            axis.text(
                max(load, 1.0) + 0.03 if load > 0.8 else load + 0.03,
                position,
                f"{load:.2f}",
                va="center",
                color=INK,
                fontsize=9,
            )
        axis.vlines(1.0, first - 0.5, first + PICTURE_CP - 0.5, INK, ":", linewidth=1)
        received = plan.rows_received / 1024
        axis.text(
            0,
            first - 1.35,
            f"{name}: max/mean {plan.imbalance:.3f}",
            fontweight="bold",
            color=INK,
            va="center",
        )
        axis.text(
            0,
            first - 0.82,
            f"keys received: mean {received.mean():.1f}K, max {received.max():.1f}K",
            color=MUTED,
            va="center",
            fontsize=9,
        )
    axis.set_xlim(0, top * 1.12)
    axis.set_ylim(2 * PICTURE_CP + 1.8, -1.8)
    axis.set_yticks([])
    axis.set_xticks([0, 0.5, 1.0, 1.5])
    axis.tick_params(length=0, labelcolor=MUTED)
    axis.set_xlabel("attention tiles of a rank / mean", color=MUTED)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.spines["left"].set_color(GRID)


def _clean(*axes: Any) -> None:
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    return path
