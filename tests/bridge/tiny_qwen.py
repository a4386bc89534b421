"""As Bridge's Qwen3VLModel: images go into a packed stream, which one function then shares out.

The function and the language model come from Bridge, or from the stand-in of it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.text_model import Qwen3VLGPTModel
from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_cp_partition_indices
from torch import Tensor

IMAGE = 100
"""The token in whose place a vision embedding comes."""

NUM_DEEPSTACK = 2


class TinyQwen(torch.nn.Module):
    """A language model, and a vision model that is one linear layer."""

    def __init__(self, language_model: Qwen3VLGPTModel, patch_size: int, cp_group: Any) -> None:
        super().__init__()
        self.language_model, self.cp_group = language_model, cp_group
        hidden = language_model.config.hidden_size
        self.vision_model = torch.nn.Linear(patch_size, hidden * (1 + NUM_DEEPSTACK), bias=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        packed_seq_params: Any = None,
        pixel_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        index = None
        if packed_seq_params is not None and self.cp_group.size() > 1:
            index = get_packed_seq_cp_partition_indices(
                packed_seq_params,
                total_tokens=input_ids.size(1),
                cp_size=self.cp_group.size(),
                cp_rank=self.cp_group.rank(),
                device=input_ids.device,
                cp_group=self.cp_group,
            )
        embedded, mask, deepstack = self._embedded(input_ids, pixel_values)
        if index is not None:
            deepstack = deepstack and [_selected(x, mask, index) for x in deepstack]
            mask, input_ids, labels, loss_mask = (
                x.index_select(1, index) for x in (mask, input_ids, labels, loss_mask)
            )
            position_ids = position_ids.index_select(2, index)
            embedded = embedded.index_select(0, index)
        self.language_model.rotary_pos_emb.is_thd_format = packed_seq_params is not None
        output = self.language_model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=None,
            decoder_input=embedded,
            labels=labels,
            loss_mask=loss_mask,
            packed_seq_params=packed_seq_params,
            visual_pos_masks=mask,
            deepstack_visual_embeds=deepstack,
        )
        return output, loss_mask

    def _embedded(
        self, input_ids: Tensor, pixel_values: Tensor | None
    ) -> tuple[Tensor, Tensor, list[Tensor] | None]:
        """The whole stream's embeddings with those of images, and what the layers add."""
        mask = input_ids == IMAGE
        embedded = self.language_model.embedding(input_ids, None)
        if pixel_values is None:
            return embedded, mask, None
        of_images, *deepstack = self.vision_model(pixel_values).chunk(1 + NUM_DEEPSTACK, dim=-1)
        rows = embedded.transpose(0, 1).clone()
        rows[mask] = of_images
        return rows.transpose(0, 1).contiguous(), mask, deepstack


def _selected(of_images: Tensor, mask: Tensor, index: Tensor) -> Tensor:
    """The features whose rows this rank has, in its order."""
    whole = of_images.new_zeros(*mask.shape, of_images.shape[-1])
    whole[mask] = of_images
    return whole.index_select(1, index)[mask.index_select(1, index)]
