"""The job's sizes and attention heads, from Megatron's arguments."""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_magi.adapter.model_shape import LATENT_LAYERS, head_shape
from megatron_magi.core.plan import HeadShape

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "seq_length",
    "micro_batch_size",
)
"""Arguments by which others are divided, or that are multiplied to a number of tokens."""


def wrong_sizes(args: Any) -> list[str]:
    """One line for each size below 1; rules that compute with sizes are not asked then."""
    given = {name: getattr(args, name, None) for name in SIZES}
    return [
        f"--{name.replace('_', '-')} must be at least 1, got {size}; change it"
        for name, size in given.items()
        if size is not None and size < 1
    ]


def ranks_of_layers(args: Any) -> tuple[int, int]:
    """(ranks of one copy of the dense layers, ranks of one copy of the expert layers).

    Weight shards beyond the tensor-parallel size take ranks of their own.
    """
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    experts = getattr(args, "expert_tensor_parallel_size", None) or tp
    dense = getattr(args, "tensor_parallel_num_weight_shards", None) or tp
    experts = getattr(args, "expert_tensor_parallel_num_weight_shards", None) or experts
    ep = getattr(args, "expert_model_parallel_size", None) or 1
    return dense * pp * args.context_parallel_size, experts * ep * pp


def smallest_world(args: Any) -> int:
    """The least number of ranks that dense and expert layers can share; a job has a multiple."""
    return math.lcm(*ranks_of_layers(args))


def splits_sequence(args: Any) -> bool:
    """True if sequence parallelism splits rows; Megatron switches it off for one tensor rank."""
    return bool(args.sequence_parallel and args.tensor_model_parallel_size > 1)


def microbatch_tokens(args: Any) -> list[int]:
    """The numbers of tokens that microbatches of training and of validation have; none if the
    arguments do not say it."""
    length = getattr(args, "seq_length", None) or getattr(args, "encoder_seq_length", None)
    names = ("micro_batch_size", "eval_micro_batch_size")
    counts = [count for name in names if (count := getattr(args, name, None))]
    return [length * count for count in dict.fromkeys(counts)] if length else []


def knows_heads(args: Any) -> bool:
    """True if the arguments say it; else a checkpoint, or a script of another model, does."""
    return bool(getattr(args, "num_attention_heads", None) and getattr(args, "hidden_size", None))


def heads_of(args: Any) -> HeadShape:
    """The job's attention heads on one tensor-parallel rank."""
    return head_shape(ModelSizes(args, dtype_of(args)))


def refused_heads(args: Any) -> str | None:
    """One line if heads cannot be shared out evenly, over tensor-parallel ranks or over the key
    heads of one, else None."""
    if not knows_heads(args):
        return None
    heads, ranks = args.num_attention_heads, args.tensor_model_parallel_size
    if heads % ranks:
        return (
            f"--num-attention-heads must be a multiple of --tensor-model-parallel-size, got "
            f"{heads} and {ranks}; change one of them"
        )
    groups = ModelSizes(args, dtype_of(args)).num_query_groups or heads
    if groups % ranks and ranks % groups and not has_latent_layers(args):
        return (
            f"--num-query-groups must be a multiple or a divisor of --tensor-model-parallel-size, "
            f"got {groups} and {ranks}; change one of them"
        )
    try:
        heads_of(args)
    except ValueError as error:
        return f"{error} (--num-attention-heads, --num-query-groups, --tensor-model-parallel-size)"
    return None


def has_latent_layers(args: Any) -> bool:
    """Returns True for MLA, where every query head has its own key head; the pattern of a hybrid
    model decides it, whatever the flag says."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    pattern = next((given for name in names if (given := getattr(args, name, None))), None)
    if pattern:
        return "+" in pattern
    return bool(getattr(args, "multi_latent_attention", False))


def dtype_of(args: Any) -> torch.dtype:
    """Of the job's parameters."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


class ModelSizes:
    """Megatron's arguments as `head_shape` reads a model's config."""

    def __init__(self, args: Any, dtype: torch.dtype) -> None:
        self._args = args
        self.params_dtype = dtype

    def __getattr__(self, name: str) -> Any:
        if name == LATENT_LAYERS:
            return has_latent_layers(self._args)
        value = getattr(self._args, name, None)
        if name == "kv_channels" and value is None:
            return self._args.hidden_size // self._args.num_attention_heads
        if name == "num_query_groups" and not getattr(self._args, "group_query_attention", True):
            return None  # Megatron's default is 1, and counts only with that flag
        return value
