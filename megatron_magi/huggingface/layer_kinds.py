"""Reads the kinds of a model's layers from its Transformers configuration."""

from __future__ import annotations

from typing import Any

ATTENTION = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers that mix tokens by attention alone, as configurations name them."""
INTERFACE = ("_supports_attention_backend", "_supports_sdpa")
"""Attribute of model classes that take their attention from Transformers."""


def other_layers(model_config: Any) -> str | None:
    """Layers that mix tokens by a state or a convolution, in words. None if there are none."""
    for name in ("layer_types", "layers_block_type"):
        kinds = set(getattr(model_config, name, None) or ()) - ATTENTION
        if kinds:
            return f"{name} with {', '.join(sorted(kinds))}"
    return None


def with_own_attention(model_config: Any) -> str | None:
    """The name of the model's class if it never asks for the attention of
    ``attn_implementation``; None: it does, or Transformers does not know the model."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as MODELS
    except ImportError:  # a configuration of one's own needs no Transformers
        return None
    if type(model_config) not in MODELS:
        return None
    found = MODELS[type(model_config)]
    model = found[0] if isinstance(found, tuple) else found
    return None if any(getattr(model, name, False) for name in INTERFACE) else model.__name__
