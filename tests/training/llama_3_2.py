"""Llama 3.2 1B: its config.json, and the model section of a recipe that says the same."""

from __future__ import annotations

from typing import Any

from megatron_magi.training.recipe.run_values import ModelConfig
from tests.training.tiny_hf import LLAMA3

LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
OURS = ModelConfig(
    num_layers=16,
    hidden_size=2048,
    ffn_hidden_size=8192,
    num_attention_heads=32,
    num_query_groups=8,
    vocab_size=128256,
    rotary_base=500000,
    rope_scaling=True,
    rope_scaling_factor=32.0,
    norm_epsilon=1e-5,
    tie_embeddings=True,
)
