"""Rejects jobs that --magi-balance-step does not support, in the launcher and in `check`.

Megatron's own balancing of samples (dynamic and hybrid context parallelism) and reinforcement
learning are refused with magi's switch already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_magi.launcher.documents import has_documents

FLAG = "--magi-balance-step"


def balance_refusals(args: Any, mask_name: str | None) -> Iterator[str]:
    """One line for each setting with which samples cannot be dealt by their cost."""
    if getattr(args, "dataloader_type", None) == "external":
        yield (
            f"{FLAG} requires --dataloader-type single or cyclic, got external, whose loader deals "
            f"its samples by itself; leave {FLAG} out"
        )
    if mask_name is not None:
        yield (
            f"{FLAG} requires the cost of a sample before its rows are read, got --magi-mask "
            f"{mask_name}; leave one of them out"
        )
    if not has_documents(args):
        yield (
            f"{FLAG} requires documents in a sample, got none, so that all samples cost the same; "
            f"pass --dataloader-inter-document-masking, --sft or --reset-attention-mask, or leave "
            f"{FLAG} out"
        )
