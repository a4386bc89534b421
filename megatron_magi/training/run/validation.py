"""Mean loss over held-out samples, the same ones every time."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_magi.training.data.packed_samples import PackedDataset
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.run.microbatch import microbatch_streams
from megatron_magi.training.run.step import StepSchedule


class Validation:
    """The held-out documents of a run.

    Raises:
        RecipeError: when they hold fewer samples than one validation reads.
    """

    def __init__(
        self, config: RunConfig, model_config: TransformerConfig, device: torch.device
    ) -> None:
        if config.data.balance_steps is not None:  # The samples of more steps may be too many.
            config = replace(config, data=replace(config.data, balance_steps=1))
        self.config = config
        v = config.validation
        self.dataset = PackedDataset(
            config.data, 0, v.fraction, validation=True, vocab_size=config.model.vocab_size
        )
        needed = v.batches * config.train.global_batch_size
        if self.dataset.samples_per_epoch < needed:
            raise RecipeError(
                f"validation.batches {v.batches} x train.global_batch_size "
                f"{config.train.global_batch_size} needs {needed} held-out samples, got "
                f"{self.dataset.samples_per_epoch}; lower validation.batches or raise "
                f"validation.fraction"
            )
        self._streams = partial(
            microbatch_streams, self.dataset, config, model_config, device, num_batches=v.batches
        )

    def loss(self, schedule: StepSchedule, chunks: list[Any], iteration: int) -> float:
        """Mean loss of the counted tokens, nats; every rank calls it and gets the same."""
        streams = self._streams()
        for chunk in chunks:
            chunk.eval()
        batches = range(self.config.validation.batches)
        with torch.no_grad():  # Megatron's schedule would keep two microbatches' activations
            found = [schedule(streams, train=False) for _ in batches]
        sums = [part.read(self.dataset, iteration) for part in found]
        for chunk in chunks:
            chunk.train()
        tokens = sum(part.loss_tokens for part in sums)
        return sum(part.loss_sum for part in sums) / tokens if tokens else math.nan
