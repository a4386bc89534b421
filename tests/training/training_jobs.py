"""Functions that tests/adapter/layout_worker.py runs on every rank of a world; JSON in and out."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from megatron_magi.training import loop, processes
from megatron_magi.training.config import RecipeError, RunConfig
from megatron_magi.training.recipe import build_config
from megatron_magi.training.step import TrainingStopped

processes.quiet_megatron()


def train(recipe: dict[str, Any], signal_at: int | None = None) -> Any:
    """Losses and gradient norms of a run, bit for bit; or the one-line error that ended it.

    Args:
        recipe: keys and values of a `RunConfig`, nested.
        signal_at: iteration in which the last rank gets SIGTERM.
    """
    config = _config(recipe)
    processes._initialize_megatron(config)
    if (
        signal_at is not None
        and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    ):
        _send_signal_in(signal_at)
    try:
        records = loop.train(config)
    except (RecipeError, TrainingStopped) as error:
        return f"{type(error).__name__}: {error}"
    return [
        [r.iteration, r.lm_loss.hex(), r.grad_norm.hex(), str(r.validation_loss)] for r in records
    ]


def _send_signal_in(iteration: int) -> None:
    step = loop._train_step

    def with_signal(schedule: Any, streams: Any, dataset: Any, state: Any) -> Any:
        if state.iteration + 1 == iteration:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(schedule, streams, dataset, state)

    loop._train_step = with_signal


def _config(recipe: dict[str, Any]) -> RunConfig:
    from omegaconf import OmegaConf

    return build_config([OmegaConf.create(recipe)])
