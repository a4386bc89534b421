"""Heads, windows and row multiples of a model, from its config or from Megatron's arguments."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_magi.checks import shown
from megatron_magi.core.plan import HeadShape


def check_model_config(model_config: TransformerConfig) -> None:
    """Refuse what has not the fields of a model config; Megatron's own arguments have them too."""
    if not hasattr(model_config, "tensor_model_parallel_size"):
        raise TypeError(
            f"model_config must have the fields of a TransformerConfig, got {shown(model_config)}; "
            f"pass the config of the model"
        )


def head_shape(model_config: TransformerConfig) -> HeadShape:
    """Heads on one tensor-parallel rank, as the core attention sees them."""
    tp_size = model_config.tensor_model_parallel_size
    groups = model_config.num_query_groups or model_config.num_attention_heads
    head_dim, head_dim_v = model_config.kv_channels, None
    if has_latent_layers(model_config):  # every query head has its own key head
        groups = model_config.num_attention_heads
        head_dim = model_config.qk_head_dim + model_config.qk_pos_emb_head_dim
        head_dim_v = model_config.v_head_dim
    return HeadShape(
        num_heads_q=model_config.num_attention_heads // tp_size,
        num_heads_kv=max(1, groups // tp_size),
        head_dim=head_dim,
        bytes_per_element=torch.finfo(model_config.params_dtype).bits // 8,
        head_dim_v=head_dim_v,
    )


def has_latent_layers(model_config: TransformerConfig) -> bool:
    """True if the attention layers are MLA. The pattern of a hybrid model decides it, whatever the
    setting is, and `prepare_model` keeps in the config what it says."""
    return bool(getattr(model_config, LATENT_LAYERS, model_config.multi_latent_attention))


LATENT_LAYERS = "magi_has_latent_layers"
"""The attribute of a model's config in which `prepare_model` keeps that answer."""

ROWS_OF_RECIPE = {"mxfp8": 32, "blockwise": 128}
"""The number of rows in TransformerEngine's fp8 products must be a multiple of this, by recipe."""

ROWS_OF_FP8 = 16
"""The multiple that the other recipes of fp8 need."""

ROWS_OF_FP4 = 128
"""The multiple that fp4 needs."""


def token_multiple(model_config: TransformerConfig) -> int:
    """The number that a rank's rows must be divisible by: sequence parallelism splits them once
    more over its tensor-parallel group, and linear layers in fp8 and fp4 take whole blocks."""
    multiple = 1
    if getattr(model_config, "fp8", None):
        recipe: Any = getattr(model_config, "fp8_recipe", None)
        multiple = ROWS_OF_RECIPE.get(getattr(recipe, "value", recipe), ROWS_OF_FP8)
    if getattr(model_config, "fp4", None):
        multiple = ROWS_OF_FP4
    if not model_config.sequence_parallel:
        return multiple
    return multiple * int(model_config.tensor_model_parallel_size)


def window_layers(model_config: TransformerConfig) -> list[bool]:
    """Returns True for each layer with window attention, by layer number. The layers of multi-token
    prediction come last; a window_attn_skip_freq that is a list does not include them."""
    count = model_config.num_layers
    if not isinstance(model_config.window_attn_skip_freq, list):
        count += getattr(model_config, "mtp_num_layers", None) or 0
    return [is_window_layer(model_config, number + 1) for number in range(count)]


def is_window_layer(model_config: TransformerConfig, layer_number: int) -> bool:
    """True for a layer with window attention; layer_number counts from 1, as Megatron does."""
    return is_layer_window_attention(
        model_config.window_size, model_config.window_attn_skip_freq, layer_number
    )
