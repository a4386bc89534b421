"""`megatron_magi`, its classes, its mask builders and `megatron_magi.core.plan`."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import megatron_magi as magi
from megatron_magi import masks
from megatron_magi.core import plan as planning
from tests.edge import kinds as kind
from tests.edge.call import Call
from tests.edge.kinds import COUNT, FLAG, INF, INT, NAN, POSITIVE, TENSOR, WINDOW, Kind

TOKENS = 16
MASK = masks.from_cu_seqlens([0, 6, TOKENS])
SHAPE = magi.HeadShape(2, 1, 8, 4)
PLAN = magi.plan(MASK, 1, SHAPE)
Q, K = torch.randn(TOKENS, 2, 8), torch.randn(TOKENS, 1, 8)
QKV = {"q": Q, "k": K, "v": K}
QKV_KINDS = {"q": TENSOR, "k": TENSOR, "v": TENSOR}
LOCAL: dict[str, Any] = {"plan": PLAN, "cp_group": None}
LOCAL_KINDS = {"plan": kind.PLAN, "cp_group": kind.GROUP.also((3, "cp_group must be"))}
DIM = INT.also((1, "dimension 1"), (-2, "dimension -2"))
SUMS = {"cu_seqlens": [0, 6, TOKENS]}
TOTAL = {"total_seqlen": COUNT.without(None)}
PADDED = {"total_seqlen": 20}
AREA = (("q_start", 0), ("q_end", 4), ("k_start", 0), ("k_end", 4), ("d_lo", -3), ("d_hi", 3))
WIDE = INT.also((2**40, "between"))
RATE = kind.NUMBER.also((NAN, "finite"), (INF, "finite"), (0, "0"), (-1.0, "-1"))

RANGES = {
    "q_ranges": torch.tensor([[0, 16]]),
    "k_ranges": torch.tensor([[0, 16]]),
    "attn_type_map": torch.tensor([1]),
}
FLEX_KINDS = {
    **QKV_KINDS,
    "q_ranges": kind.INT_TENSOR.without(None).also((None, "must both be given")),
    "k_ranges": kind.INT_TENSOR.without(None).also((None, "must both be given")),
    "attn_type_map": kind.INT_TENSOR.without(None).also((torch.tensor([7]), "codes")),
    "softmax_scale": kind.SCALE,
    "deterministic": FLAG,
}
SLICES = Kind(tuple((bad, "slices must be") for bad in (3, [[0, 1]], np.zeros((1, 6), int))))
DTYPE = kind.config("dtype").also((torch.int32, "fp32"), (torch.bool, "fp32"))

FUNCTIONS = [
    Call(
        "flex_flash_attn_func",
        magi.flex_flash_attn_func,
        QKV | RANGES,
        FLEX_KINDS | {"backend": kind.WORD, "out_dtype": DTYPE},
        free=("slices",),
    ),
    Call(
        "flex_flash_attn_func",
        magi.flex_flash_attn_func,
        QKV,
        {"slices": SLICES},
        free=(*FLEX_KINDS, "backend", "out_dtype"),
    ),
    Call(
        "dist_attn",
        magi.dist_attn,
        QKV | LOCAL,
        QKV_KINDS | LOCAL_KINDS | {"softmax_scale": kind.SCALE},
    ),
    Call(
        "dispatch",
        magi.dispatch,
        {"x": torch.zeros(TOKENS)} | LOCAL,
        {"x": TENSOR, "dim": DIM, "pad_value": kind.NUMBER} | LOCAL_KINDS,
        words={"dim": "dim"},
    ),
    Call(
        "dispatch",
        magi.dispatch,
        {"x": torch.zeros(TOKENS, dtype=torch.uint8)} | LOCAL,
        {"pad_value": INT.without(1.0).also((300, "between 0 and 255"), (NAN, "integer"))},
        free=("x", "dim", *LOCAL),
    ),
    Call(
        "undispatch",
        magi.undispatch,
        {"x_local": torch.zeros(TOKENS)} | LOCAL,
        {"x_local": TENSOR, "dim": DIM, "is_partial_grad": FLAG} | LOCAL_KINDS,
        words={"x_local": "x", "dim": "dim"},
    ),
    Call(
        "shift_tokens",
        magi.shift_tokens,
        {"x_local": torch.zeros(TOKENS), "shift": 1} | LOCAL,
        {"x_local": TENSOR, "shift": INT, "dim": DIM} | LOCAL_KINDS,
        words={"x_local": "x", "dim": "dim"},
    ),
    Call(
        "position_ids",
        magi.position_ids,
        LOCAL,
        {
            "plan": kind.PLAN,
            "cp_group": kind.GROUP.also((True, "integer"), (-1, "between"), (1, "between")),
            "device": kind.DEVICE,
        },
    ),
    Call(
        "position_ids",
        magi.position_ids,
        {"plan": PLAN, "cp_group": 0},
        {"plan": kind.PLAN},
        free=("cp_group", "device"),
    ),
    Call("agree", magi.agree, LOCAL, LOCAL_KINDS),
    Call(
        "plan",
        magi.plan,
        {"mask": MASK, "cp_size": 1, "head_shape": SHAPE},
        {
            "mask": kind.MASK,
            "cp_size": kind.GROUP.also((True, "integer"), (0, "between 1"), (2**20, "8192")),
            "head_shape": kind.HEADS,
            "config": kind.config("MagiConfig"),
            "layout": kind.LAYOUT.without(None),
            "token_multiple": POSITIVE,
        },
        words={"cp_size": "cp_"},
    ),
    Call("slices_tensor", magi.slices_tensor, {"mask": MASK}, {"mask": kind.MASK}),
]

PLANNING = [
    Call(
        "make_attn_plan",
        planning.make_attn_plan,
        {"mask": MASK, "cp_size": 1, "head_shape": SHAPE, "config": magi.MagiConfig()},
        {
            "mask": kind.MASK,
            "cp_size": POSITIVE.also((2**20, "8192")),
            "head_shape": kind.HEADS,
            "config": kind.config("MagiConfig").also((None, "must be a MagiConfig")),
            "layout": kind.LAYOUT.without(None),
            "token_multiple": POSITIVE,
        },
    ),
    Call(
        "make_shift_plan",
        planning.make_shift_plan,
        {"layout": PLAN.layout, "shift": 3, "rank": 0},
        {"layout": kind.LAYOUT, "shift": INT, "rank": COUNT.also((1, "got 1"))},
    ),
    Call(
        "num_local_tokens",
        planning.num_local_tokens,
        {"total_seqlen": 16, "cp_size": 2, "config": magi.MagiConfig()},
        {
            "total_seqlen": COUNT,
            "cp_size": POSITIVE,
            "config": kind.config("MagiConfig").also((None, "must be a MagiConfig")),
            "token_multiple": POSITIVE,
        },
    ),
    Call(
        "most_buffered_rows",
        planning.most_buffered_rows,
        {"stages": PLAN.rank_plan(0).stages},
        {"stages": kind.everything("stage", 3, "ab", [1], None)},
        words={"stages": "stage"},
    ),
]


def plan_fields() -> Call:
    """An AttnPlan by hand, as a pickle makes it."""
    good = {f.name: getattr(PLAN, f.name) for f in fields(PLAN) if f.init}
    arrays = kind.everything("", [[0]], None, np.zeros((1, 2), np.int32), np.zeros((1, 5)))
    return Call(
        "AttnPlan",
        magi.AttnPlan,
        good,
        {
            "mask": kind.MASK,
            "layout": kind.LAYOUT,
            "head_shape": kind.HEADS,
            "config": kind.config("MagiConfig"),
            "overlap_degree": COUNT,
            "forward_mode": kind.WORD,
            "transfers": arrays,
            "loads": arrays,
            "digest": COUNT,
            "field_digests": kind.everything("dict", [1], "ab", None),
        },
    )


CLASSES = [
    plan_fields(),
    Call("AttnPlan.rank_plan", PLAN.rank_plan, {"rank": 0}, {"rank": COUNT.also((1, "got 1"))}),
    Call(
        "AttnForwardMeta",
        magi.AttnForwardMeta,
        {"lse": Q, "max_logits": None},
        {"lse": TENSOR, "max_logits": TENSOR.without(None)},
    ),
    Call(
        "AttnMask",
        magi.AttnMask,
        {"slices": MASK.slices, "total_seqlen_q": 16, "total_seqlen_k": 16},
        {
            "slices": kind.everything("slices must", 3, None, [[0, 1]], [[0.5] * 6], [[True] * 6])
            .also((magi.AttnSlice(0, 1, 0, 1), "list"))
            .also((np.full((1, 6), 2**64 - 1, np.uint64), "int64")),
            "total_seqlen_q": COUNT.also((2**40, "int32")),
            "total_seqlen_k": COUNT.also((2**40, "int32")),
        },
    ),
    Call("AttnSlice", magi.AttnSlice, dict(AREA), {name: WIDE for name, _ in AREA}),
    Call(
        "AttnSlice.cut",
        magi.AttnSlice(**dict(AREA)).cut,
        dict(AREA[:4]),
        {name: WIDE for name, _ in AREA[:4]},
    ),
    Call(
        "AttnSlice.shift",
        magi.AttnSlice(**dict(AREA)).shift,
        {"dq": 1, "dk": 2},
        {"dq": INT.also((2**40, "between")), "dk": INT.also((2**40, "between"))},
        words={"dq": "", "dk": ""},
    ),
    Call(
        "TokenLayout",
        magi.TokenLayout,
        {"total_seqlen": 15, "chunk_size": 4, "cp_size": 2, "chunk_ranks": [0, 1, 1, 0]},
        {
            "total_seqlen": COUNT,
            "chunk_size": POSITIVE,
            "cp_size": POSITIVE,
            "chunk_ranks": kind.INTS.also(([2**40] * 2, "int32"), ([], "chunks")),
        },
    ),
    Call("TokenLayout.local_ranges", PLAN.layout.local_ranges, {"rank": 0}, {"rank": COUNT}),
    Call("TokenLayout.position_ids", PLAN.layout.position_ids, {"rank": 0}, {"rank": COUNT}),
    Call("TokenLayout.check_rank", PLAN.layout.check_rank, {"rank": 0}, {"rank": COUNT}),
    Call(
        "HeadShape",
        magi.HeadShape,
        {"num_heads_q": 4, "num_heads_kv": 2, "head_dim": 8, "head_dim_v": 4},
        {
            "num_heads_q": POSITIVE,
            "num_heads_kv": POSITIVE,
            "head_dim": POSITIVE.also((2**40, "integer")),
            "bytes_per_element": POSITIVE,
            "head_dim_v": POSITIVE.without(None),
        },
    ),
    Call(
        "CostTable",
        magi.CostTable,
        {},
        {
            "tile_q": POSITIVE,
            "tile_k": POSITIVE,
            **dict.fromkeys(("link_gib_s", "kernel_tflops", "memory_gib_s"), RATE),
            "stage_latency_us": kind.NUMBER.also((NAN, "finite"), (INF, "finite"), (-1, "-1")),
        },
    ),
    Call(
        "MagiConfig",
        magi.MagiConfig,
        {},
        {
            "chunk_size": POSITIVE.without(None).also((2**40, "2147483647")),
            "balancer": kind.WORD,
            "max_imbalance": kind.NUMBER.also((NAN, ">= 1.0"), (0.5, ">= 1.0")),
            "swap_trials": COUNT.without(None),
            "overlap_degree": COUNT.without(None),
            "forward_mode": kind.WORD.without(None),
            "costs": kind.config("CostTable").also((None, "must be a CostTable")),
            "agreement_timeout_s": RATE,
            "kernel_backend": kind.WORD,
            "deterministic": FLAG,
            "dkv_reduce_in_fp32": FLAG,
        },
    ),
]

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
        {"questions": kind.INTS, "answers": kind.everything("row", 3, [3], ["ab"], [[1.5]], None)}
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
