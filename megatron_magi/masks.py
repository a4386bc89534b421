"""Mask builders under one short public name: ``magi.masks.from_cu_seqlens(...)``."""

from megatron_magi.core.mask.builders import (
    block_causal,
    causal,
    cu_seqlens_from_eod,
    from_cu_seqlens,
    from_dense,
    from_eod_positions,
    from_ranges,
    full,
    global_and_window,
    prefix_lm,
    prefix_tree,
    shared_question,
    sliding_window,
)
from megatron_magi.core.mask.render import draw_mask, render_dense

__all__ = [
    "block_causal",
    "causal",
    "cu_seqlens_from_eod",
    "draw_mask",
    "from_cu_seqlens",
    "from_dense",
    "from_eod_positions",
    "from_ranges",
    "full",
    "global_and_window",
    "prefix_lm",
    "prefix_tree",
    "render_dense",
    "shared_question",
    "sliding_window",
]
