"""Validation: a mean over its batches, without keeping what a backward pass would need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_magi.training.recipe.recipe import load_recipe
from megatron_magi.training.run.step import StepSums
from megatron_magi.training.run.validation import Validation


def test_it_keeps_no_activations_and_leaves_the_model_training(packed_data: Path) -> None:
    config = load_recipe(
        "tiny_llama_cpu",
        [f"data.path={packed_data}", "data.seq_length=64", "parallel.cp=1",
         "validation.fraction=0.2", "validation.interval=1", "validation.batches=2"],
    )  # fmt: skip
    validation = Validation(config, None, torch.device("cpu"))  # type: ignore[arg-type]
    validation._streams = lambda: []  # type: ignore[assignment, misc, return-value]
    chunk = torch.nn.Linear(1, 1)
    seen: list[tuple[bool, bool]] = []

    def schedule(*args: Any, train: bool) -> StepSums:
        loss = chunk(torch.ones(1)).sum()
        seen.append((loss.requires_grad or train, chunk.training))
        sums = torch.tensor([6.0 * len(seen), 3.0, 0.0, 0.0, 1.0], dtype=torch.float64)
        return StepSums(sums, None, [])

    assert validation.loss(schedule, [chunk], 1) == 3.0  # type: ignore[arg-type]
    assert seen == [(False, False)] * 2 and chunk.training and torch.is_grad_enabled()
