"""The quick start's pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from megatron_magi import HeadShape
from megatron_magi.compare.differences import Comparison
from megatron_magi.core.plan import make_attn_plan
from megatron_magi.training.data.packed_samples import (
    PackedDataset,
    PackedSample,
    mask_of_documents,
)
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import DataConfig
from megatron_magi.viz.plan_facts import PER_SEQUENCE, Layouts, compare_layouts, zigzag_layout
from megatron_magi.viz.plan_figures import fill_shares, layouts_there
from megatron_magi.viz.style import GRID, INK, MUTED

RUN_COLORS = ("#222222", "#1f77b4", "#d62728")
PICTURE_CP, PICTURE_TOKENS, PICTURE_CANDIDATES = 4, 32768, 63
TINY = 1e-9
"""Differences below this, also 0, are drawn here."""
RUN_LABELS = (
    "baseline: Megatron's dense attention, CP 1",
    "megatron_magi, CP 2",
    "one document boundary moved by a token",
)
RUN_STYLES: tuple[dict[str, Any], ...] = (
    {"linewidth": 5, "alpha": 0.25},
    {"linewidth": 1.6},
    {"linewidth": 1.2, "linestyle": (0, (4, 3))},
)


def draw_losses(comparisons: list[Comparison], path: Path) -> Path:
    """Loss curves of the runs above, their difference from the baseline below."""
    figure = plt.figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_curves(top, comparisons)
    _draw_differences(bottom, comparisons)
    return _save(figure, path)


def draw_shares(config: RunConfig, path: Path) -> Path:
    """One packed sample of the corpus: each rank's share under both zigzags and our layout."""
    figure = plt.figure(figsize=(17, 5.2), layout="constrained")
    _fill_shares(figure, config)
    return _save(figure, path)


def draw_both(comparisons: list[Comparison], config: RunConfig, path: Path) -> Path:
    """Shares above, curves and differences below: the README's first image."""
    figure = plt.figure(figsize=(17, 8.6), layout="constrained")
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
    axis.set_ylabel("|loss / baseline - 1|", color=MUTED)
    axis.set_xlabel("iteration", color=MUTED)
    axis.set_title("Difference from the baseline", loc="left", color=INK)
    _clean(axis)


def _fill_shares(figure: Any, config: RunConfig) -> None:
    sample, layouts = typical_sample(config)
    drawn = layouts_there(layouts)
    panels = figure.subplots(1, len(drawn) + 1, width_ratios=(*[1] * len(drawn), 0.72))
    fill_shares(panels, drawn)
    for axes in panels[1:-1]:
        axes.set_ylabel("")
    figure.suptitle(
        f"Who computes what on {PICTURE_CP} ranks: a packed sample of {PICTURE_TOKENS // 1024}K "
        f"tokens, {len(sample.cu_seqlens) - 1} documents, causal inside each "
        f"(of {PICTURE_CANDIDATES} samples, the median of {PER_SEQUENCE})",
        x=0.008,
        y=1.035,
        ha="left",
        va="bottom",
        color=INK,
    )


def share_facts(config: RunConfig) -> dict[str, Any]:
    """The numbers in the picture of shares, for the record."""
    sample, layouts = typical_sample(config)
    return {
        "tokens": PICTURE_TOKENS,
        "documents": len(sample.cu_seqlens) - 1,
        "cp_size": PICTURE_CP,
        "sample": f"{sample.index}, the median of {PER_SEQUENCE} of {PICTURE_CANDIDATES}",
    } | {
        name: {
            "imbalance": round(layout.imbalance, 4),
            "tiles": layout.loads.tolist(),
            "keys_received": layout.rows_received.tolist(),
            "keys_needed": layout.rows_needed.tolist(),
            "padding_tokens": layout.padding_tokens,
        }
        for name, layout in layouts_there(layouts).items()
    }


def typical_sample(config: RunConfig) -> tuple[PackedSample, Layouts]:
    """Of the corpus's first samples the one whose imbalance under zigzag per sequence is the
    median, and its layouts."""
    data = DataConfig(path=config.data.path, seq_length=PICTURE_TOKENS, prefetch=0)
    dataset = PackedDataset(data, config.train.seed)
    heads = HeadShape(32, 8, 64)
    layout = zigzag_layout(PICTURE_TOKENS, PICTURE_CP)
    candidates = []
    for i in range(min(PICTURE_CANDIDATES, dataset.samples_per_epoch)):
        mask = mask_of_documents(dataset[i].cu_seqlens, data)
        plan = make_attn_plan(mask, PICTURE_CP, heads, config.magi, layout=layout)
        candidates.append((plan.imbalance, i, plan))
    _, index, zigzag = sorted(candidates, key=lambda c: c[:2])[len(candidates) // 2]
    ours = make_attn_plan(zigzag.mask, PICTURE_CP, heads, config.magi)
    return dataset[index], compare_layouts(ours, zigzag)


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
