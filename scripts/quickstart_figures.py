"""The quick start's pictures."""

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
from megatron_magi.training.data import PackedDataset, PackedSample, sample_mask

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
PICTURE_CP, PICTURE_TOKENS, PICTURE_CANDIDATES = 4, 32768, 63
TINY = 1e-9
"""Differences below this, also 0, are drawn here."""
RUN_LABELS = (
    "reference: Megatron's dense attention, CP 1",
    "megatron_magi, CP 2",
    "one document boundary moved by a token",
)
RUN_STYLES: tuple[dict[str, Any], ...] = (
    {"linewidth": 5, "alpha": 0.25},
    {"linewidth": 1.6},
    {"linewidth": 1.2, "linestyle": (0, (4, 3))},
)


def draw_losses(comparisons: list[Comparison], path: Path) -> Path:
    """Loss curves of the runs above, their difference from the reference below."""
    figure = plt.figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_curves(top, comparisons)
    _draw_differences(bottom, comparisons)
    return _save(figure, path)


def draw_shares(config: RunConfig, path: Path) -> Path:
    """One packed sample of the corpus: each rank's share under zigzag and under our dispatch."""
    figure = plt.figure(figsize=(13, 5.2), layout="constrained")
    _fill_shares(figure, config)
    return _save(figure, path)


def draw_both(comparisons: list[Comparison], config: RunConfig, path: Path) -> Path:
    """Shares above, curves and differences below: the README's first image."""
    figure = plt.figure(figsize=(13, 8.6), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(5.2, 3.4), hspace=0.04)
    _fill_shares(upper, config)
    left, right = lower.subplots(1, 2)
    _draw_curves(left, comparisons)
    _draw_differences(right, comparisons)
    return _save(figure, path)


def _draw_curves(axis: Any, comparisons: list[Comparison]) -> None:
    for c, label, color, style in zip(comparisons, RUN_LABELS, RUN_COLORS, RUN_STYLES, strict=True):
        axis.plot(np.arange(1, len(c.run.loss) + 1), c.run.loss, label=label, color=color, **style)
    axis.set_ylabel("lm loss (nats per token)", color=MUTED)
    axis.set_xlabel("iteration", color=MUTED)
    axis.legend(frameon=False, labelcolor=INK)
    axis.set_title("Same training, half of every sequence on each rank", loc="left", color=INK)
    _clean(axis)


def _draw_differences(axis: Any, comparisons: list[Comparison]) -> None:
    steps = np.arange(1, len(comparisons[0].run.loss) + 1)
    for c, color, style in list(zip(comparisons, RUN_COLORS, RUN_STYLES, strict=True))[1:]:
        axis.plot(steps, np.maximum(c.loss_difference, TINY), color=color, **style)
    gate = comparisons[0].gates.any_step_loss
    axis.axhline(gate, color=MUTED, linewidth=1, linestyle=":")
    axis.text(steps[-1], gate * 1.3, "allowed", ha="right", color=MUTED, fontsize=9)
    axis.set_yscale("log")
    axis.set_ylabel("|loss / reference - 1|", color=MUTED)
    axis.set_xlabel("iteration", color=MUTED)
    axis.set_title("Difference from the reference", loc="left", color=INK)
    _clean(axis)


def _fill_shares(figure: Any, config: RunConfig) -> None:
    sample, zigzag, ours = typical_sample(config)
    plans = {"zigzag": zigzag, "megatron_magi": ours}
    axes = figure.subplots(1, 3, width_ratios=(1, 1, 0.62))
    for axis, (name, plan) in zip(axes, plans.items(), strict=False):
        _draw_share(axis, name, plan)
    axes[0].set_ylabel("query", color=MUTED)
    axes[1].set_ylabel("")
    for rank in range(PICTURE_CP):
        axes[0].plot([], [], "s", color=RANK_COLORS[rank], markersize=9, label=f"rank {rank}")
    axes[0].legend(loc="upper right", frameon=False, labelcolor=INK, handletextpad=0.2)
    _draw_loads(axes[2], plans)
    figure.suptitle(
        f"Who computes what on {PICTURE_CP} ranks: a packed sample of {PICTURE_TOKENS // 1024}K "
        f"tokens, {len(sample.cu_seqlens) - 1} documents, causal inside each "
        f"(of {PICTURE_CANDIDATES} samples, zigzag's median)",
        x=0.008,
        y=1.035,
        ha="left",
        va="bottom",
        color=INK,
    )


def share_facts(config: RunConfig) -> dict[str, Any]:
    """The numbers in the picture of shares, for the record."""
    sample, *plans = typical_sample(config)
    return {
        "tokens": PICTURE_TOKENS,
        "documents": len(sample.cu_seqlens) - 1,
        "cp_size": PICTURE_CP,
        "sample": f"{sample.index}, zigzag's median of {PICTURE_CANDIDATES}",
    } | {
        name: {
            "imbalance": round(plan.imbalance, 4),
            "tiles": plan.loads.tolist(),
            "keys_received": plan.rows_received.tolist(),
        }
        for name, plan in zip(("zigzag", "megatron_magi"), plans, strict=True)
    }


def typical_sample(config: RunConfig) -> tuple[PackedSample, AttnPlan, AttnPlan]:
    """Of the corpus's first samples the one whose zigzag imbalance is the median; both plans."""
    data = DataConfig(path=config.data.path, seq_length=PICTURE_TOKENS, prefetch=0)
    dataset = PackedDataset(data, config.train.seed)
    heads = HeadShape(32, 8, 64)
    candidates = []
    for i in range(min(PICTURE_CANDIDATES, dataset.samples_per_epoch)):
        mask = sample_mask(dataset[i], data)
        plan = make_attn_plan(mask, PICTURE_CP, heads, config.magi, dispatch=_zigzag())
        candidates.append((plan.imbalance, i, plan))
    _, index, zigzag = sorted(candidates, key=lambda c: c[:2])[len(candidates) // 2]
    ours = make_attn_plan(zigzag.mask, PICTURE_CP, heads, config.magi)
    return dataset[index], zigzag, ours


def _draw_share(axis: Any, name: str, plan: AttnPlan) -> None:
    """The mask's cells in the color of the rank that computes their row."""
    masks.draw_mask(plan.mask, axis, row_bands=_row_bands(plan))
    axis.set_title(name, loc="left", color=INK, fontweight="bold")
    ticks = range(0, PICTURE_TOKENS + 1, PICTURE_TOKENS // 4)
    labels = [f"{t // 1024}K" if t else "0" for t in ticks]
    axis.set_xticks(ticks, labels)
    axis.set_yticks(ticks, labels)
    axis.tick_params(length=0, labelcolor=MUTED)
    axis.spines[:].set_color(GRID)
    axis.set_xlabel("key", color=MUTED)


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
        axis.spines[["left", "bottom"]].set_color(GRID)
        axis.tick_params(length=0, labelcolor=MUTED)
        axis.grid(axis="y", color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    return path
