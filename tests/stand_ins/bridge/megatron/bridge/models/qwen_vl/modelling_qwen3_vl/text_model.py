"""The language model of Bridge's Qwen3-VL, as far as packed training reaches it.

As in Bridge, its constructor replaces the decoder and the rotary embedding of GPTModel's, and its
first layers add the deeper features of images to the rows of images.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor


class Qwen3VLMultimodalRotaryEmbedding(torch.nn.Module):
    """Interleaved mRoPE; it slices angles unless the model says that rows are packed."""

    def __init__(self, kv_channels: int, rotary_base: int, cp_group: Any) -> None:
        super().__init__()
        steps = torch.arange(0, kv_channels, 2, dtype=torch.float32)
        self.inv_freq = 1.0 / rotary_base ** (steps / kv_channels)
        self.cp_group, self.is_thd_format = cp_group, False

    def forward(self, position_ids: Tensor, mrope_section: list[int], **unused: Any) -> Tensor:
        freqs = position_ids[..., None].float() * self.inv_freq
        mixed = freqs[0]
        for axis in (1, 2):
            places = slice(axis, 3 * mrope_section[axis], 3)
            mixed[..., places] = freqs[axis][..., places]
        angles = torch.cat((mixed, mixed), dim=-1)[..., None, :].transpose(0, 1)
        if self.cp_group.size() > 1 and not self.is_thd_format:
            angles = get_pos_emb_on_this_cp_rank(angles, 0, self.cp_group)
        return angles


class Qwen3VLTransformerBlock(TransformerBlock):
    """Layers, of which the first ones add features of images."""

    def forward(
        self,
        hidden_states: Tensor,
        packed_seq_params: Any,
        rotary_pos_emb: Tensor,
        visual_pos_masks: Tensor | None,
        deepstack_visual_embeds: list[Tensor] | None,
    ) -> Tensor:
        for number, layer in enumerate(self.layers):
            hidden_states, _ = layer(
                hidden_states,
                attention_mask=None,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
            )
            if deepstack_visual_embeds is not None and number < len(deepstack_visual_embeds):
                rows = hidden_states.transpose(0, 1).clone()
                rows[visual_pos_masks] += deepstack_visual_embeds[number]
                hidden_states = rows.transpose(0, 1).contiguous()
        return self.final_layernorm(hidden_states)


class Qwen3VLGPTModel(GPTModel):
    """GPTModel with a decoder and a rotary embedding of its own."""

    def __init__(self, config: Any, transformer_layer_spec: Any, **kwargs: Any) -> None:
        super().__init__(config=config, transformer_layer_spec=transformer_layer_spec, **kwargs)
        self.rotary_pos_emb = Qwen3VLMultimodalRotaryEmbedding(
            kv_channels=config.kv_channels, rotary_base=10000, cp_group=self.pg_collection.cp
        )
        self.decoder = Qwen3VLTransformerBlock(config=config, spec=transformer_layer_spec)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        packed_seq_params: Any = None,
        loss_mask: Tensor | None = None,
        visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: list[Tensor] | None = None,
    ) -> Tensor:
        hidden, angles, *_ = self._preprocess(
            input_ids,
            position_ids,
            decoder_input=decoder_input,
            packed_seq_params=packed_seq_params,
        )
        hidden = self.decoder(
            hidden, packed_seq_params, angles, visual_pos_masks, deepstack_visual_embeds
        )
        return self._postprocess(
            hidden, input_ids, position_ids, labels, angles, None, None,
            loss_mask=loss_mask, packed_seq_params=packed_seq_params,
        )  # fmt: skip
