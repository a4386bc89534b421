"""Mask builders under one short public name: ``magi.masks.from_cu_seqlens(...)``."""

from megatron_magi.core.kernel.autograd import one_graph_break
from megatron_magi.core.mask import block_mask, builders
from megatron_magi.viz.mask_drawing import draw_mask, render_dense

# Made on the host, with numpy, of which torch.compile would make tensors.
block_causal = one_graph_break(builders.block_causal)
causal = one_graph_break(builders.causal)
chunked = one_graph_break(builders.chunked)
cu_seqlens_from_eod = one_graph_break(builders.cu_seqlens_from_eod)
from_block_mask = one_graph_break(block_mask.from_block_mask)
from_cu_seqlens = one_graph_break(builders.from_cu_seqlens)
from_dense = one_graph_break(builders.from_dense)
from_eod_positions = one_graph_break(builders.from_eod_positions)
from_ranges = one_graph_break(builders.from_ranges)
full = one_graph_break(builders.full)
global_and_window = one_graph_break(builders.global_and_window)
prefix_lm = one_graph_break(builders.prefix_lm)
prefix_tree = one_graph_break(builders.prefix_tree)
shared_question = one_graph_break(builders.shared_question)
sliding_window = one_graph_break(builders.sliding_window)
within_window = one_graph_break(builders.within_window)

__all__ = [
    "block_causal",
    "causal",
    "chunked",
    "cu_seqlens_from_eod",
    "draw_mask",
    "from_block_mask",
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
    "within_window",
]
