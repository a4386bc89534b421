"""Activation: prepare a built model, prove that our attention runs, say so in one line."""

from __future__ import annotations

from typing import Any

from megatron_magi.config import MagiConfig


def attach(model: Any, magi_config: MagiConfig | None = None, seq_length: int | None = None) -> str:
    """Make a GPTModel (or list of chunks, DDP-wrapped or not) ready for our batches.

    Replaces the rotary embedding by one that follows the plan's positions, checks loss settings
    and that every self-attention runs our core attention, and prints one start-up line on rank 0:
    kernel backend, transport, cp size, chunk, balance (of a causal stream of seq_length tokens).

    Returns:
        The start-up line.

    Raises:
        RuntimeError: the plugin is asked for and some layer runs another core attention.
        NotImplementedError: a feature that does not work with context parallelism here.
    """
    raise NotImplementedError


def assert_active(model: Any) -> None:
    """Raise RuntimeError (one line) unless every self-attention layer runs our core attention."""
    raise NotImplementedError
