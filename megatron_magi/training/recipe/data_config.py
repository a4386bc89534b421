"""The data of a run, and its attention mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """Packed documents in Megatron's .bin/.idx files; see scripts/prepare_data.py."""

    path: str = ""
    """Prefix of PREFIX.bin and PREFIX.idx."""
    seq_length: int = 1024
    """Tokens of a packed sample; any number."""
    eod_token: int = 256
    """Id that ends a document. 256 is the built-in byte tokenizer's."""
    mask: Literal["document", "causal", "block_causal"] = "document"
    """"document": causal inside each document. "causal": causal over the whole sample.
    "block_causal": the sample in blocks, such as video frames; a token sees its whole block and the
    blocks before."""
    block_tokens: int | None = None
    """Tokens of a block of mask block_causal; a sample's last block may be shorter."""
    block_window: int | None = None
    """Blocks that a token sees, its own included, with mask block_causal. None: all before it."""
    window: int | None = None
    """Keys a token sees, itself included (sliding window). None: all before it."""
    mask_across_documents: bool = True
    """Leave the label after an EOD out of the loss: it is the next document's first token."""
    step_order: Literal["forward", "reversed"] = "forward"
    """Order in which a step's samples go to replicas and microbatches. It changes the last bits of
    sums alone: "reversed" shows how far rounding moves two equal runs apart."""
    balance_steps: int | None = None
    """Steps whose samples change places, so that replicas and pipeline microbatches of a step cost
    the same; see docs/training.md. 1: every step keeps its samples. None: the sampler's order."""
    prefetch: int = 2
    """Microbatches that a thread reads and plans ahead. 0: none."""
    moved_boundary: int = 0
    """A control: moves each sample's first inner document boundary by this many tokens, in the
    attention mask only. A comparison must catch it. 0 in real runs."""
