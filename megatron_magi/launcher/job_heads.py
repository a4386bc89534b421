"""The job's attention heads, from Megatron's arguments."""

from __future__ import annotations

from typing import Any

import torch

from megatron_magi.adapter.packed import head_shape
from megatron_magi.core.plan import HeadShape


def heads_of(args: Any) -> HeadShape:
    """The job's attention heads on one tensor-parallel rank."""
    return head_shape(_ModelSizes(args, dtype_of(args)))


def refused_heads(args: Any) -> str | None:
    """One line if a key head of a tensor-parallel rank would not serve as many query heads as
    another, else None."""
    if not getattr(args, "num_attention_heads", None) or not getattr(args, "hidden_size", None):
        return None  # a checkpoint, or a script of another model, brings them
    try:
        heads_of(args)
    except ValueError as error:
        return f"{error} (--num-attention-heads, --num-query-groups, --tensor-model-parallel-size)"
    return None


def dtype_of(args: Any) -> torch.dtype:
    """Of the job's parameters."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


class _ModelSizes:
    """Megatron's arguments as `head_shape` reads a model's config."""

    def __init__(self, args: Any, dtype: torch.dtype) -> None:
        self._args = args
        self.params_dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._args, name, None)
        if name == "kv_channels" and value is None:
            return self._args.hidden_size // self._args.num_attention_heads
        if name == "num_query_groups" and not getattr(self._args, "group_query_attention", True):
            return None  # Megatron's default is 1, and counts beside that flag alone
        return value
