"""Bridge's settings as Megatron's arguments, by which the launcher's rules and hooks read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

FIELDS = {
    "ddp": {
        "average_in_collective": "ddp_average_in_collective",
        "use_megatron_fsdp": "use_megatron_fsdp",
    },
    "dist": {"use_torch_fsdp2": "use_torch_fsdp2", "use_megatron_fsdp": "use_megatron_fsdp"},
    "checkpoint": {"async_save": "async_save"},
    "comm_overlap": {"overlap_moe_expert_parallel_comm": "overlap_moe_expert_parallel_comm"},
    "mixed_precision": {
        "bf16": "bf16",
        "fp16": "fp16",
        "fp8": "fp8",
        "fp8_recipe": "fp8_recipe",
        "fp8_dot_product_attention": "fp8_dot_product_attention",
        "fp8_multi_head_attention": "fp8_multi_head_attention",
    },
    "train": {"micro_batch_size": "micro_batch_size"},
    "dataset": {
        "seq_length": "seq_length",
        "reset_attention_mask": "reset_attention_mask",
        "reset_position_ids": "reset_position_ids",
        "dataloader_type": "dataloader_type",
    },
}
"""Parts of the settings besides the model: {its field: Megatron's argument}."""

MODEL_FIELDS = {
    "num_moe_experts": "num_experts",
    "restore_modelopt_state": "modelopt_enabled",
}
"""Fields of the model that Megatron's arguments have by another name."""

PACKS = ("enable_offline_packing", "enable_in_batch_packing")
"""Fields of a data set's settings under which its samples have cu_seqlens."""

DEFAULTS = {
    "bf16": False,
    "calculate_per_token_loss": False,
    "cuda_graph_impl": "none",
    "fp16": False,
    "micro_batch_size": 1,
    "reset_attention_mask": False,
    "sft": False,
    "transformer_impl": "transformer_engine",
}
"""Arguments that rules read of every job and that Bridge may not set."""


def _field(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def arguments_of(config: Any) -> SimpleNamespace:
    """Megatron's arguments that say what a ConfigContainer says."""
    args = SimpleNamespace(**DEFAULTS)
    set_arguments(args, config)
    # A recipe may name its precision, which Bridge looks up later: bf16_mixed, fp16_mixed.
    if isinstance(config.mixed_precision, str):
        args.bf16 = args.bf16 or config.mixed_precision.startswith("bf16")
        args.fp16 = args.fp16 or config.mixed_precision.startswith("fp16")
    args.sft = any(_field(config.dataset, name) for name in PACKS)
    return args


def set_arguments(args: Any, config: Any, read: Callable[[Any, str], Any] = _field) -> None:
    """Set in ``args`` whatever the settings say.

    Args:
        read: (owner, field's name) -> its value, None if it has none.
    """
    for part, names in FIELDS.items():
        for field, argument in names.items():
            _set(args, argument, read(read(config, part), field))
    model = read(config, "model")
    # A GPTModelConfig holds a TransformerConfig; a provider is one.
    for owner in (read(model, "transformer"), model):
        for field in getattr(owner, "__dict__", {}):
            _set(args, field, read(owner, field))
        for field, argument in MODEL_FIELDS.items():
            _set(args, argument, read(owner, field))


def _set(args: Any, argument: str, value: Any) -> None:
    if value is not None:
        setattr(args, argument, value)


def in_words_of_bridge(line: str) -> str:
    """A line of the launcher about flags, which Bridge has as fields."""
    names = {argument: field for field, argument in MODEL_FIELDS.items()}
    names |= {a: f"{part}.{field}" for part, f in FIELDS.items() for field, a in f.items()}
    names |= {"sft": "packing", "magi_mask": "mask", "magi_chunk_size": "chunk_size"}
    line = line.replace("--attention-backend magi", "use_magi")

    def field_of(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        return names.get(name, name)

    return re.sub(r"--([a-z][a-z0-9-]*)", field_of, line)
