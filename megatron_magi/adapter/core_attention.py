"""The module that Megatron's attention layers call between the QKV and the output projection."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType as MegatronMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_magi.adapter.graphs import captures_attention, graph_names
from megatron_magi.adapter.max_logit import record_max_logits, wants_max_logits
from megatron_magi.adapter.model_shape import is_window_layer
from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.adapter.plain_plan import plain_plan
from megatron_magi.adapter.softmax_sink import add_softmax_offset, sharded_offset
from megatron_magi.config import MagiConfig
from megatron_magi.core.kernel.softmax import Softmax
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.runtime.dist_attn import dist_attn, dist_attn_and_max_logits

NOT_CAUSAL = (MegatronMaskType.no_mask, MegatronMaskType.padding)
"""Mask types of a layer spec that a causal plan does not compute."""


class MagiCoreAttention(MegatronModule):  # type: ignore[misc]
    """Core attention whose mask and layout come from the microbatch's `MagiPackedSeqParams`.

    It is a drop-in replacement for DotProductAttention and TEDotProductAttention. The query holds
    this rank's rows of the packed stream, in the plan's order; keys of other ranks are fetched
    inside. The plan's mask replaces `attn_mask_type`. Plain batches (packed_seq_params None) have
    causal attention over each sequence. They come without context parallelism, and with it where
    CUDA graphs hold attention: a rank then has Megatron's two mirrored pieces of each sequence.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: MegatronMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        """Megatron's constructor; cp_comm_type is ignored, as there is one way to communicate.

        Multi-latent attention passes k_channels, the head_dim of queries and keys. v_channels, the
        head_dim of values, is ignored, because the value tensor has it.

        Raises:
            NotImplementedError: the config asks for a feature that this attention does not have.
        """
        super().__init__(config=config)
        check_attention_config(config, attention_type, attention_dropout)
        self.layer_number = max(1, layer_number)
        self.cp_group = getattr(pg_collection, "cp", None)
        usual = 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.softmax_scale = usual if softmax_scale is None else softmax_scale
        self.is_attached = False
        self.is_captured = captures_attention(config)
        self.plain_config = MagiConfig()
        self.attn_mask_type = attn_mask_type
        add_softmax_offset(self, config)
        # Read and reset by Megatron's QK-clip.
        self.current_max_attn_logits: Tensor | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: MegatronMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> Tensor:
        """Attend over the keys that the plan's mask shows.

        Args:
            query: [rows, batch, heads of this TP rank, head_dim]; batch 1 if packed. Packed rows
                may come without the batch dimension, as Bridge's Qwen3-VL has them.
            key: [rows, batch, kv heads of this TP rank, head_dim].
            value: likewise; its head_dim may differ (multi-latent attention).
            attention_mask: must be None, because the plan has the mask.
            packed_seq_params: `MagiPackedSeqParams`, or None with a plain batch.

        Returns:
            [rows, batch, heads * head_dim of value] in the query's dtype.

        Raises:
            ValueError: a dense mask, a bias, packed_seq_params of another class, a plain batch of a
                layer that is not causal, or row counts or heads that differ from the plan's.
            RuntimeError: packed rows in a model that was not attached.
        """
        _refuse_masks(attention_mask, attention_bias)
        if query.dim() == 3 and isinstance(packed_seq_params, MagiPackedSeqParams):
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        rows, batch, heads = _shape(query)
        _check_keys(query, key, value)
        if packed_seq_params is None:
            _require_causal(self.attn_mask_type if attn_mask_type is None else attn_mask_type)
        plan, cp_group = self._plan_and_group(packed_seq_params, rows, batch)
        expected = plan.layout.num_local_tokens
        if rows * batch != expected:
            raise ValueError(
                f"core attention requires the {expected} rows the plan gives to each rank, got "
                f"{rows} rows x batch {batch}; dispatch the batch by the same plan"
            )
        q_THD, k_SGD, v_SGD = (
            x.transpose(0, 1).reshape(rows * batch, x.shape[2], x.shape[3])
            for x in (query, key, _values_to_save(value, key))
        )
        sink = None if self.softmax_offset is None else self.softmax_offset[None]
        softmax = Softmax(self.softmax_scale, sink=sink)
        call = (q_THD, k_SGD, v_SGD, plan, cp_group, softmax)
        if wants_max_logits(self.config):
            out_THD, _, max_logits_H = dist_attn_and_max_logits(*call)
            record_max_logits(self, max_logits_H)
        else:
            out_THD, _ = dist_attn(*call)
        out = out_THD.reshape(batch, rows, heads * value.shape[3]).transpose(0, 1)
        return out.contiguous()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's sharded state: the learnable softmax_offset, split by heads."""
        return sharded_offset(self, prefix, sharded_offsets, metadata)

    def attach(self, magi_config: MagiConfig) -> None:
        """Take packed rows from now on, and these settings for plain batches."""
        self.is_attached = True
        self.plain_config = magi_config

    def _plan_and_group(self, given: Any, rows: int, batch: int) -> tuple[AttnPlan, Any]:
        """This layer's plan and context-parallel group; of a plain batch, whose sequences are
        causal, the same plan in every call, so that a CUDA graph may hold the call."""
        if isinstance(given, MagiPackedSeqParams):
            self._require_attached()
            self._require_eager()
            return given.plan_of_layer(self.config, self.layer_number), given.cp_group
        cp_size = self.config.context_parallel_size
        if given is not None or (cp_size > 1 and not self.is_captured):
            raise ValueError(
                f"MagiCoreAttention requires MagiPackedSeqParams when tokens are packed or "
                f"context_parallel_size > 1, got {type(given).__name__} with "
                f"context_parallel_size={cp_size}; make them with make_packed_seq_params or "
                f"from_packed_seq_params and dispatch the batch by them"
            )
        has_window = is_window_layer(self.config, self.layer_number)
        plan = plain_plan(rows, batch, has_window, self.config, self.plain_config)
        return plan, None if cp_size == 1 else self.cp_group or get_context_parallel_group()

    def _require_eager(self) -> None:
        """A replay would repeat the plan that was captured, whatever comes with its rows."""
        if self.is_captured:
            raise ValueError(
                f"CUDA graphs that hold attention require plain batches, got MagiPackedSeqParams "
                f"with {graph_names(self.config)}; set cuda_graph_impl='none'"
            )

    def _require_attached(self) -> None:
        if not self.is_attached:
            raise RuntimeError(
                "a model with MagiCoreAttention must be attached before it takes packed rows, got "
                "one whose rotary embedding still follows Megatron's own shares; call "
                "megatron_magi.adapter.plugin.attach(model) once it is built"
            )


def check_attention_config(
    config: TransformerConfig,
    attention_type: str = "self",
    attention_dropout: float | None = None,
) -> None:
    """Refuse, when the model is built, settings that would silently give wrong results.

    Raises:
        NotImplementedError: names the setting, its value and what to set.
    """
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    own_balancing = ("hybrid_context_parallel", "dynamic_context_parallel")
    if captures_attention(config) and wants_max_logits(config):
        raise NotImplementedError(
            f"qk_clip and log_max_attention_logit require CUDA graphs without attention, got "
            f"{graph_names(config)}: a replay hands them no logits; set cuda_graph_impl='none', or "
            f"both to False"
        )
    rules: list[tuple[str, Any, Any]] = [
        ("attention_type", attention_type, "self"),
        ("attention_dropout", dropout, 0.0),
        ("fp8_dot_product_attention", config.fp8_dot_product_attention, False),
        ("fp8_multi_head_attention", config.fp8_multi_head_attention, False),
        *((name, getattr(config, name, False), False) for name in own_balancing),
    ]
    for name, got, required in rules:
        if got != required:
            raise NotImplementedError(
                f"MagiCoreAttention requires {name}={required!r}, got {got!r}; set it so, or keep "
                f"Megatron's own core attention for this model"
            )


def _require_causal(mask_type: MegatronMaskType) -> None:
    if mask_type in NOT_CAUSAL:
        raise ValueError(
            f"MagiCoreAttention requires attn_mask_type causal for a plain batch, got "
            f"{mask_type.name}; pass MagiPackedSeqParams, whose mask it computes"
        )


def _refuse_masks(attention_mask: Tensor | None, attention_bias: Tensor | None) -> None:
    for name, x in (("attention_mask", attention_mask), ("attention_bias", attention_bias)):
        if x is not None:
            raise ValueError(
                f"MagiCoreAttention requires {name}=None because the plan holds the mask, got a "
                f"tensor of shape {tuple(x.shape)}; describe it as an AttnMask instead"
            )


def _check_keys(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.shape[:2] == key.shape[:2] == value.shape[:2]:
        raise ValueError(
            f"MagiCoreAttention requires keys and values of the query's rows and batch, got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}; use "
            f"Megatron's own core attention for inference with cached keys"
        )


def _values_to_save(value: Tensor, key: Tensor) -> Tensor:
    """The values, copied if the backward would otherwise keep a larger tensor because of them.

    That is the projection of queries, keys and values together: rotary embedding makes new queries
    and keys, and the values alone would hold it. Where the keys are a part of it too, it stays.
    """
    whole = value.untyped_storage()
    will_backward = value.requires_grad and torch.is_grad_enabled()
    if not will_backward or whole.nbytes() == value.nbytes:
        return value
    if key.untyped_storage().data_ptr() == whole.data_ptr():
        return value
    return value.clone(memory_format=torch.contiguous_format)


def _shape(query: Tensor) -> tuple[int, int, int]:
    if query.dim() != 4:
        raise ValueError(
            f"MagiCoreAttention requires sbhd tensors [rows, batch, heads, head_dim], got shape "
            f"{tuple(query.shape)}; pass MagiPackedSeqParams, not a thd PackedSeqParams"
        )
    rows, batch, heads, _ = query.shape
    return rows, batch, heads
