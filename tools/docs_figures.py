"""The pictures of the docs, drawn by the same code as ``megatron-magi viz``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_magi import AttnMask, HeadShape, MagiConfig, masks
from megatron_magi.core.plan import AttnPlan, make_attn_plan
from megatron_magi.viz.mask_drawing import draw_mask
from megatron_magi.viz.plan_facts import Layouts, compare_layouts, zigzag_layout
from megatron_magi.viz.plan_figures import mask_axes, shares_figure, traffic_figure
from megatron_magi.viz.style import new_figure, save, title
from megatron_magi.viz.timeline_figure import timeline_figure

HEADS = HeadShape(32, 8, 128)
DOCUMENTS = [0, 12, 40, 64]


def masks_figure(named: dict[str, AttnMask], columns: int = 4) -> Any:
    """Several small masks in one sheet."""
    rows = -(-len(named) // columns)
    figure, grid = new_figure(rows, columns, 2.5 * columns, 2.75 * rows, squeeze=False)
    for axes, (name, mask) in zip(grid.flat, named.items(), strict=False):
        draw_mask(mask, axes)
        mask_axes(axes, mask)
        axes.set(xlabel="", ylabel="")
        title(axes, name)
    for axes in grid.flat[len(named) :]:
        axes.set_visible(False)
    return figure


def builder_masks() -> dict[str, AttnMask]:
    """One small mask per builder."""
    return {
        "full": masks.full(64),
        "causal": masks.causal(64),
        "sliding_window": masks.sliding_window(64, (15, 0)),
        "from_cu_seqlens": masks.from_cu_seqlens(DOCUMENTS),
        "... with a window": masks.from_cu_seqlens(DOCUMENTS, window_size=(7, 0)),
        "... not causal": masks.from_cu_seqlens(DOCUMENTS, causal=False),
        "global_and_window": masks.global_and_window([0, 64], (7, 0), 6),
        "prefix_lm": masks.prefix_lm(DOCUMENTS, [5, 16, 8]),
        "block_causal": masks.block_causal([[12, 12, 12], [4, 10, 14]]),
        "... window of 3 blocks": masks.block_causal([8] * 8, window=3),
        "shared_question": masks.shared_question([16, 8], [[8, 12, 6], [6, 8]]),
        "prefix_tree": masks.prefix_tree([14, 10, 8, 12, 10, 10], [-1, 0, 1, 1, 0, 4]),
        "from_block_mask": masks.from_block_mask(random_blocks(8), 8),
        "... causal": masks.from_block_mask(random_blocks(8), 8, causal=True),
        "from_dense": masks.from_dense(dilated(64)),
        "padding behind": masks.from_cu_seqlens([0, 20, 48], total_seqlen=64),
    }


def type_masks() -> dict[str, AttnMask]:
    """MagiAttention's four types on a wide and on a tall rectangle."""
    named = {}
    for code, name in enumerate(("full (0)", "causal (1)", "inv_causal (2)", "bi_causal (3)")):
        named[name] = masks.from_ranges([[12, 36]], [[8, 56]], [code], total_seqlen_q=64)
    for code, name in enumerate(("full", "causal", "inv_causal", "bi_causal")):
        tall = masks.from_ranges([[8, 56]], [[12, 36]], [code], total_seqlen_q=64)
        named[f"{name}, more rows"] = tall
    return named


def dilated(length: int) -> Any:
    """Causal, and beyond eight keys only every eighth."""
    q, k = np.arange(length)[:, None], np.arange(length)[None, :]
    return (k <= q) & ((q - k < 8) | (k % 8 == 0))


def random_blocks(count: int) -> Any:
    """[count, count] blocks, of which two in five and the diagonal are visible."""
    return (np.random.default_rng(1).random((count, count)) < 0.4) | np.eye(count, dtype=bool)


def packed_lengths(total: int, seed: int = 3) -> list[int]:
    """Lengths like real text's: many short documents, a few long ones, cut at a quarter."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        drawn = int(rng.lognormal(7.3, 1.2)) + 16
        lengths.append(min(drawn, total // 4, total - sum(lengths)))
    return lengths


def draw_all(folder: Path) -> list[Path]:
    """Every picture; returns the paths."""
    total, cp_size = 65536, 4
    lengths = packed_lengths(total)
    packed = masks.from_cu_seqlens(np.cumsum([0, *lengths]))
    plan = _planned(packed, cp_size)
    video = masks.block_causal([[4096] * 6, [2048] * 4])
    text = f"{len(lengths)} packed documents, 64K tokens, causal inside each: who computes what"
    figures = {
        "mask_builders": masks_figure(builder_masks()),
        "mask_types": masks_figure(type_masks()),
        "shares_packed": shares_figure(_layouts(packed, cp_size), text),
        "shares_video": shares_figure(
            _layouts(video, cp_size), "Two clips of video blocks, block-causal"
        ),
        "traffic_packed": traffic_figure(plan),
        "timeline_packed": timeline_figure(plan),
    }
    return [
        path for name, figure in figures.items() for path in save(figure, folder / name, ("png",))
    ]


def _planned(mask: AttnMask, cp_size: int) -> AttnPlan:
    return make_attn_plan(mask, cp_size, HEADS, MagiConfig())


def _layouts(mask: AttnMask, cp_size: int) -> Layouts:
    usual = zigzag_layout(mask.total_seqlen_q, cp_size)
    per_sequence = make_attn_plan(mask, cp_size, HEADS, MagiConfig(), layout=usual)
    return compare_layouts(_planned(mask, cp_size), per_sequence)
