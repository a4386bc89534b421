"""Table of what `--attention-backend magi` changes in a Megatron job besides attention."""

from __future__ import annotations

from dataclasses import dataclass

MASK_FLAG = "--no-create-attention-mask-in-dataloader"


@dataclass(frozen=True)
class Change:
    """One setting of a job that the flag replaces."""

    name: str
    """Name in Megatron's arguments, of an environment variable, or of a part of the program."""
    becomes: str
    """Value or behaviour with the flag."""
    reason: str
    """Sentence that begins in lower case and says why."""
    stock_flag: str | None = None
    """Megatron's flag that makes a job without magi equal; a fair comparison passes it. None means
    that stock Megatron keeps its own setting."""


ARGUMENTS = (
    Change("attention_backend", "Megatron's default", "the launcher removes its own value"),
    Change("calculate_per_token_loss", "`True`", "ranks hold different numbers of counted tokens"),
    Change("ddp_average_in_collective", "`False`", "gradients are divided by counted tokens"),
    Change(
        "create_attention_mask_in_dataloader",
        "`False`",
        "the plan is the mask. Stock Megatron copies seq_length x seq_length bytes a sample, which "
        "TransformerEngine does not read",
        MASK_FLAG,
    ),
    Change(
        "cp_comm_type",
        '`["all_gather"]`',
        "Megatron's dev branch requires it for layers without TransformerEngine; attention does "
        "not read it",
    ),
)
"""Arguments that differ after Megatron's `validate_args`."""

BESIDES_ARGUMENTS = (
    Change(
        "`NVTE_FLASH_ATTN`, `NVTE_FUSED_ATTN`, `NVTE_UNFUSED_ATTN`",
        "unset, unless 1",
        "they choose an attention of TransformerEngine, and Megatron stops if its own flag chooses "
        "none",
    ),
    Change(
        "samples of Megatron's data loader",
        "drawn two microbatches ahead",
        "a thread makes their plans meanwhile",
    ),
    Change(
        "samples of a microbatch",
        "joined to one stream, padded at its end",
        "the plan balances them together",
    ),
)
"""Environment variables and data loading."""
