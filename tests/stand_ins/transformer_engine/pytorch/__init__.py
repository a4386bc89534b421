"""Layers, in plain PyTorch."""

from transformer_engine.pytorch import distributed, fp8, module, ops, router
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.module.linear import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.module.norm import LayerNorm, RMSNorm

autocast = fp8_autocast
quantized_model_init = fp8_model_init

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "autocast",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "module",
    "ops",
    "quantized_model_init",
    "router",
]
