"""A launch of one process: a model's config is known, and no process group is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import megatron_magi.adapter  # noqa: F401  prepares megatron before it is imported
from megatron_magi.config import MagiConfig
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.session import LauncherState


def launch_of(length: int, count: int = 1, mask: str | None = None, **args: Any) -> LauncherState:
    """Inside a schedule of microbatches with `count` sequences of `length` tokens."""
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    given = SimpleNamespace(**{"reset_attention_mask": False, **args})
    options = LauncherOptions(MagiConfig(), mask)
    return LauncherState(options, args=given, model_config=config, sequences=(count, length))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's context-parallel group has this rank alone."""
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 0)
