"""The attention of Bridge's Qwen3-VL: it drops the batch dimension of packed rows, whatever their
format, and takes rows for packed wherever cu_seqlens_q is set."""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class Qwen3VLSelfAttention(SelfAttention):
    """Attention with angles for every row."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = self.get_query_key_value_tensors(hidden_states, None)
        bounds = None
        if packed_seq_params is not None:
            query, key, value = (x.squeeze(1) for x in (query, key, value))
            bounds = packed_seq_params.cu_seqlens_q
        query, key = (self._rotated(x, rotary_pos_emb, bounds) for x in (query, key))
        out = self.core_attention(
            query, key, value, attention_mask, packed_seq_params=packed_seq_params
        )
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            out = out.reshape(len(out), 1, -1)
        return self.linear_proj(out)

    def _rotated(self, x: Tensor, angles: Tensor, bounds: Tensor | None) -> Tensor:
        if bounds is None:
            return _apply_rotary_pos_emb_bshd(x, angles)
        return _apply_rotary_pos_emb_bshd(x[:, None], angles).squeeze(1)
