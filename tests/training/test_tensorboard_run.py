"""Runs of Megatron's own trainer are read from its TensorBoard files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_magi.training.parity.differences import compare, read_run
from megatron_magi.training.recipe.recipe_error import RecipeError

SummaryWriter = pytest.importorskip("torch.utils.tensorboard").SummaryWriter


def write(folder: Path, *tags: str, steps: tuple[int, ...] = (1, 2, 3)) -> Path:
    with SummaryWriter(str(folder)) as writer:
        for step in steps:
            for tag in tags:
                writer.add_scalar(tag, 4.0 / step, step)
    return folder


def test_curves_of_every_iteration(tmp_path: Path) -> None:
    run = read_run(write(tmp_path / "run", "lm loss", "grad-norm", "iteration-time"))
    assert run.name == "run" and run.first_iteration == 1
    assert run.loss == pytest.approx([4, 2, 4 / 3]) and run.step_seconds[1] == 2
    assert np.isnan(run.tokens_per_second).all()
    assert compare(run, run).passed


@pytest.mark.parametrize("steps", [(), (1, 3)], ids=["none", "a gap"])
def test_every_iteration_is_required(tmp_path: Path, steps: tuple[int, ...]) -> None:
    write(tmp_path, "lm loss", "grad-norm", steps=steps)
    with pytest.raises(RecipeError, match=r"got .*--tensorboard-log-interval 1"):
        read_run(tmp_path)
    write(tmp_path / "other", "lm loss")
    with pytest.raises(RecipeError, match="'grad-norm' of every iteration, got lm loss in"):
        read_run(tmp_path / "other")
