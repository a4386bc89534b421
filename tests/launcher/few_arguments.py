"""Megatron's arguments as far as the launcher reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def arguments(**given: Any) -> SimpleNamespace:
    """A small model at context parallelism 2, with other values in place of the usual ones."""
    usual = {
        "rank": 0,
        "async_save": False,
        "bf16": False,
        "fp16": False,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "reset_attention_mask": False,
        "pipeline_model_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 2,
        "sequence_parallel": False,
        "transformer_impl": "local",
        "calculate_per_token_loss": False,
        "create_attention_mask_in_dataloader": True,
        "micro_batch_size": 1,
        "seq_length": 96,
        "encoder_seq_length": 96,
        "max_position_embeddings": 96,
    }
    return SimpleNamespace(**{**usual, **given})
