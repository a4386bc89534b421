"""`megatron_magi.masks`: the builders of masks, and what shows them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from megatron_magi import masks
from tests.edge import kinds as kind
from tests.edge.call import Call
from tests.edge.engine_arguments import MASK, TOKENS
from tests.edge.kinds import COUNT, FLAG, POSITIVE, WINDOW

SUMS = {"cu_seqlens": [0, 6, TOKENS]}
TOTAL = {"total_seqlen": COUNT.without(None)}
PADDED = {"total_seqlen": 20}
PREFIXES = {"prefix_lengths": [2, 0]}

BUILDERS = [
    Call(
        "full",
        masks.full,
        {"total_seqlen_q": 4, "total_seqlen_k": 6},
        {"total_seqlen_q": COUNT, "total_seqlen_k": COUNT.without(None)},
    ),
    Call(
        "causal",
        masks.causal,
        {"total_seqlen": 4},
        {"total_seqlen": COUNT},
    ),
    Call(
        "sliding_window",
        masks.sliding_window,
        {"total_seqlen": 4, "window_size": (2, 0)},
        {"total_seqlen": COUNT, "window_size": WINDOW},
    ),
    Call(
        "from_cu_seqlens",
        masks.from_cu_seqlens,
        SUMS | PADDED | {"cu_seqlens_k": [0, 6, TOKENS]},
        {
            "cu_seqlens": kind.SUMS,
            "cu_seqlens_k": kind.SUMS.without(None),
            "causal": FLAG,
            "window_size": WINDOW,
        }
        | TOTAL,
    ),
    Call(
        "within_window",
        masks.within_window,
        {"mask": MASK, "window_size": (2, 0)},
        {"mask": kind.MASK, "window_size": WINDOW},
    ),
    Call(
        "chunked",
        masks.chunked,
        SUMS | PADDED | {"chunk_size": 4},
        {"cu_seqlens": kind.SUMS, "chunk_size": POSITIVE} | TOTAL,
    ),
    Call(
        "from_eod_positions",
        masks.from_eod_positions,
        {"eod_positions": [3, 9], "total_seqlen": 16},
        {"eod_positions": kind.INTS, "total_seqlen": COUNT, "causal": FLAG, "window_size": WINDOW},
    ),
    Call(
        "cu_seqlens_from_eod",
        masks.cu_seqlens_from_eod,
        {"eod_positions": [3, 9], "total_seqlen": 16},
        {"eod_positions": kind.INTS, "total_seqlen": COUNT},
    ),
    Call(
        "global_and_window",
        masks.global_and_window,
        SUMS | PADDED | {"window_size": (2, 0), "num_global": 1},
        {"cu_seqlens": kind.SUMS, "window_size": WINDOW, "num_global": COUNT} | TOTAL,
    ),
    Call(
        "block_causal",
        masks.block_causal,
        {"blocks": [[2, 3], [4]], "window": 2} | PADDED,
        {
            "blocks": kind.INTS.without(kind.RAGGED).also(
                ([3, -1], "-1"), ([[1], [1.5]], "integers")
            ),
            "window": POSITIVE.without(None),
        }
        | TOTAL,
        words={"blocks": "block"},
    ),
    Call(
        "prefix_lm",
        masks.prefix_lm,
        SUMS | PREFIXES | PADDED,
        {"cu_seqlens": kind.SUMS, "prefix_lengths": kind.INTS} | TOTAL,
    ),
    Call(
        "shared_question",
        masks.shared_question,
        {"questions": [2], "answers": [[3, 3]]} | PADDED,
        {
            "questions": kind.INTS,
            "answers": kind.everything("row", 3, [3], ["ab"], [[1.5]], None, np.array(3)),
        }
        | TOTAL,
    ),
    Call(
        "prefix_tree",
        masks.prefix_tree,
        {"node_lengths": [2, 3, 3], "parents": [-1, 0, 0]} | PADDED,
        {"node_lengths": kind.INTS, "parents": kind.INTS} | TOTAL,
    ),
    Call(
        "from_ranges",
        masks.from_ranges,
        {
            "q_ranges": [[0, 4]],
            "k_ranges": [[0, 4]],
            "attn_type_map": [1],
            "total_seqlen_q": 4,
            "total_seqlen_k": 4,
        },
        {
            "q_ranges": kind.ROWS,
            "k_ranges": kind.ROWS,
            "attn_type_map": kind.everything("attn_type_map", [1.5], [True], "ab", 1, [7], [-1]),
            "total_seqlen_q": COUNT,
            "total_seqlen_k": COUNT.without(None),
        },
    ),
    Call(
        "from_block_mask",
        masks.from_block_mask,
        {
            "blocks": np.eye(4, dtype=bool),
            "block_size": 1,
            "total_seqlen_q": 4,
            "total_seqlen_k": 4,
        },
        {
            "blocks": kind.everything(
                "blocks must be", 3, None, [[1, 0]], [[True], [True, False]], "ab", [[[True]]]
            ),
            "block_size": kind.everything(
                "block_size must be", 1.5, "11", None, True, 0, (1, 0), (1, 1, 1), (1, 1.5)
            ),
            "total_seqlen_q": COUNT.without(None),
            "total_seqlen_k": COUNT.without(None),
            "causal": FLAG,
        },
    ),
    Call(
        "from_dense",
        masks.from_dense,
        {"dense": np.ones((2, 2), bool)},
        {"dense": kind.everything("dense mask", 3, None, [[1, 0]], [[True], [True, False]], "ab")},
    ),
    Call(
        "render_dense",
        masks.render_dense,
        {"mask": masks.causal(3)},
        {
            "mask": kind.MASK,
            "visible": kind.everything("must be a str", 3, None),
            "hidden": kind.everything("must be a str", 3, None),
        },
    ),
    Call(
        "draw_mask",
        masks.draw_mask,
        {"mask": MASK, "axes": SimpleNamespace(add_collection=None)},
        {
            "mask": kind.MASK,
            "axes": kind.everything("matplotlib", 3, None, "ab"),
            "row_bands": kind.everything("row_bands", 3, "ab", {}),
        },
        free=("color",),
    ),
]
