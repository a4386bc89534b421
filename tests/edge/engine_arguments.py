"""Arguments that several calls of the engine take, and their kinds."""

from __future__ import annotations

from typing import Any

import torch

import megatron_magi as magi
from megatron_magi import masks
from tests.edge import kinds as kind
from tests.edge.kinds import FLAG, INT, TENSOR

TOKENS = 16
MASK = masks.from_cu_seqlens([0, 6, TOKENS])
SHAPE = magi.HeadShape(2, 1, 8, 4)
PLAN = magi.plan(MASK, 1, SHAPE)
Q, K = torch.randn(TOKENS, 2, 8), torch.randn(TOKENS, 1, 8)
QKV = {"q": Q, "k": K, "v": K}
SPARSE = torch.zeros(4, 2, 8).to_sparse()
QKV_KINDS = dict.fromkeys("qkv", TENSOR.also((SPARSE, "must be a dense tensor")))
LOCAL: dict[str, Any] = {"plan": PLAN, "cp_group": None}
LOCAL_KINDS = {"plan": kind.PLAN, "cp_group": kind.GROUP.also((3, "cp_group must be"))}
DIM = INT.also((1, "dimension 1"), (-2, "dimension -2"))

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
