"""Functions of `megatron_magi`."""

from __future__ import annotations

import numpy as np
import torch

import megatron_magi as magi
from tests.edge import kinds as kind
from tests.edge.call import Call
from tests.edge.engine_arguments import (
    DIM,
    FLEX_KINDS,
    LOCAL,
    LOCAL_KINDS,
    MASK,
    PLAN,
    QKV,
    QKV_KINDS,
    RANGES,
    SHAPE,
    TOKENS,
)
from tests.edge.engine_calls_classes import EDGES, TREE
from tests.edge.kinds import FLAG, INT, NAN, POSITIVE, TENSOR, Kind

TREE_PLAN = magi.plan(TREE.mask(), 1, magi.HeadShape(2, 1, 8))
SLICES = Kind(tuple((bad, "slices must be") for bad in (3, [[0, 1]], np.zeros((1, 6), int))))
DTYPE = kind.config("dtype").also((torch.int32, "fp32"), (torch.bool, "fp32"))

FUNCTIONS = [
    Call(
        "flex_flash_attn_func",
        magi.flex_flash_attn_func,
        QKV | RANGES,
        FLEX_KINDS
        | {
            "backend": kind.WORD,
            "out_dtype": DTYPE,
            "return_max_logits": kind.FLAG,
            "softcap": kind.SOFTCAP,
            "sink": TENSOR.without(None).also((torch.zeros(3), "[s, H]")),
        },
        free=("slices",),
    ),
    Call(
        "flex_flash_attn_func",
        magi.flex_flash_attn_func,
        QKV,
        {"slices": SLICES},
        free=(*FLEX_KINDS, "backend", "out_dtype", "return_max_logits", "softcap", "sink"),
    ),
    Call(
        "flex_flash_attn_by_head_group",
        magi.flex_flash_attn_by_head_group,
        QKV | {"slices": [MASK]},
        QKV_KINDS
        | {
            "slices": SLICES.without([[0, 1]]).also(
                (None, "slices must be"),
                (MASK, "slices must be"),
                ([3], "slices[0] must be"),
                ([None], "slices[0] must be"),
                ([MASK, [0, 1]], "slices[1] must be"),
            ),
            "softmax_scale": kind.SCALE,
            "deterministic": FLAG,
            "backend": kind.WORD,
            "out_dtype": DTYPE,
            "return_max_logits": FLAG,
            "softcap": kind.SOFTCAP,
            "sink": TENSOR.without(None).also((torch.zeros(3), "[s, H]")),
        },
    ),
    Call(
        "dist_attn",
        magi.dist_attn,
        QKV | LOCAL,
        QKV_KINDS | LOCAL_KINDS | {"softmax": kind.SOFTMAX},
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
        {
            "pad_value": INT.without(1.0).also((300, "between 0 and 255"), (NAN, "integer")),
            "side": kind.WORD,
        },
        free=("x", "dim", *LOCAL),
    ),
    Call(
        "undispatch",
        magi.undispatch,
        {"x_local": torch.zeros(TOKENS)} | LOCAL,
        {"x_local": TENSOR, "dim": DIM, "is_partial_grad": FLAG, "side": kind.WORD} | LOCAL_KINDS,
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
        "tree_edges",
        magi.tree_edges,
        {"tree": TREE, "plan": TREE_PLAN, "cp_group": None},
        {
            "tree": kind.everything("must be a PrefixTree", (3, 2), "tree", None),
            "plan": kind.PLAN,
            "cp_group": kind.GROUP,
            "device": kind.DEVICE,
        },
    ),
    Call(
        "sum_by_branch",
        magi.sum_by_branch,
        {"values": torch.zeros(7), "edges": EDGES, "tree": TREE, "cp_group": None},
        {
            "values": TENSOR,
            "edges": kind.everything("must be a TreeEdges", (3, 2), "edges", None),
            "tree": kind.everything("must be a PrefixTree", (3, 2), "tree", None),
            "cp_group": kind.GROUP,
        },
    ),
    Call(
        "position_ids",
        magi.position_ids,
        LOCAL,
        {
            "plan": kind.PLAN,
            "cp_group": kind.GROUP.also((True, "integer"), (-1, "between"), (1, "between")),
            "device": kind.DEVICE,
            "side": kind.WORD,
        },
    ),
    Call(
        "position_ids",
        magi.position_ids,
        {"plan": PLAN, "cp_group": 0},
        {"plan": kind.PLAN},
        free=("cp_group", "device", "side"),
    ),
    Call(
        "prepare",
        magi.prepare,
        LOCAL | {"device": "cpu"},
        {
            "plan": kind.PLAN,
            "cp_group": kind.GROUP.also((True, "integer"), (-1, "between"), (1, "between")),
            "device": kind.DEVICE,
        },
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
            "key_layout": kind.LAYOUT.without(None),
            "token_multiple": POSITIVE,
        },
        words={"cp_size": "cp_"},
    ),
    Call("slices_tensor", magi.slices_tensor, {"mask": MASK}, {"mask": kind.MASK}),
]
