"""Bridge's Qwen3-VL: its own forward selects the rows of a packed batch, here by the plan."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from megatron_magi.adapter.packed import pipeline_seq_length
from megatron_magi.adapter.rope import RowPositions
from megatron_magi.config import MagiConfig
from megatron_magi.core.plan.token_layout import USEFUL_CHUNKS
from megatron_magi.core.runtime.token_dispatch import position_ids
from megatron_magi.launcher.model_hooks import build_with_magi, plan_stream, prepare_chunk
from megatron_magi.launcher.session import LauncherState, hook


@hook
def replace_partition(
    launch: LauncherState,
    original: Any,
    packed_seq_params: Any,
    *,
    total_tokens: int,
    device: Any,
    **unused: Any,
) -> Tensor:
    """For `get_packed_seq_cp_partition_indices`: the rows of this rank, by the plan.

    The model selects tokens, embeddings, positions, labels and loss mask by them. The plan stays
    with ``packed_seq_params``, where the language model finds it.

    Raises:
        ValueError: a stream that the plan would pad, which has no rows to select for the padding.
    """
    packed = plan_stream(launch, packed_seq_params, total_tokens)
    padded = packed.token_plan.layout.padded_seqlen
    if padded != total_tokens:
        raise ValueError(
            f"Qwen3-VL under use_magi requires packs that the plan does not pad, got "
            f"{total_tokens} tokens, which the ranks would hold as {padded}; pad every document to "
            f"a multiple of {pack_multiple(launch.model_config, launch.options.config)}"
        )
    return position_ids(packed.token_plan, launch.cp_group(), device)


@hook
def wrap_model_init(
    launch: LauncherState, original: Any, self: Any, *args: Any, **kwargs: Any
) -> None:
    """For `Qwen3VLGPTModel.__init__`, which replaces the decoder that GPTModel's has built."""
    build_with_magi(original, self, *args, **kwargs)
    prepare_chunk(launch, self)


def wrap_rotary(original: type, launch: LauncherState) -> type:
    """For `Qwen3VLMultimodalRotaryEmbedding`: with packed rows it takes positions as they come."""
    return type(original.__name__, (RowPositions, original), {})


def pack_multiple(model_config: Any, magi_config: MagiConfig) -> int:
    """A multiple of tokens that no plan pads (the rule of `num_local_tokens`)."""
    is_chosen = magi_config.chunk_size is None and model_config.context_parallel_size > 1
    num_chunks = USEFUL_CHUNKS.start if is_chosen else 1
    return num_chunks * pipeline_seq_length(1, model_config, magi_config)


def pad_packs(config: Any, magi_config: MagiConfig) -> str | None:
    """Let Bridge's collator pad documents so that no plan pads their stream.

    Args:
        config: Bridge's ConfigContainer, once it is validated, as that sets the multiple too.

    Returns:
        A line that says so; None if the multiple stays, or if the data set has none.
    """
    given = getattr(config.dataset, "in_batch_packing_pad_to_multiple_of", None)
    if given is None:
        return None
    needed = math.lcm(given, pack_multiple(config.model, magi_config))
    if needed == given:
        return None
    config.dataset.in_batch_packing_pad_to_multiple_of = needed
    return (
        f"dataset.in_batch_packing_pad_to_multiple_of is {needed}, was {given}: the plan pads no "
        f"row that Qwen3-VL selects"
    )
