"""Keys of one rank and 16 tokens in two documents, by either function."""

from __future__ import annotations

from typing import Any

from megatron_magi import magi_attention as api


def varlen_key(**changes: Any) -> api.DistAttnRuntimeKey:
    arguments = {
        "cu_seqlens_q": [0, 5, 16], "cu_seqlens_k": [0, 5, 16], "num_heads_q": 4,
        "num_heads_kv": 2, "head_dim": 8, "pad_size": 0, "cp_group_or_mesh": None,
    }  # fmt: skip
    return api.magi_attn_varlen_key(**(arguments | changes))


def flex_key(**changes: Any) -> api.DistAttnRuntimeKey:
    ranges = api.AttnRanges.from_ranges([[0, 5], [5, 16]])
    arguments = {
        "q_ranges": ranges, "k_ranges": ranges, "attn_mask_type": "full", "total_seqlen_q": 16,
        "total_seqlen_k": 16, "num_heads_q": 4, "num_heads_kv": 2, "head_dim": 8, "pad_size": 0,
        "cp_group_or_mesh": None,
    }  # fmt: skip
    return api.magi_attn_flex_key(**(arguments | changes))
