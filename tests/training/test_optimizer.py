"""Megatron's optimizer and schedule are given what the recipe says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import (
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from megatron_magi.training.run import model


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Megatron was called with, by name; it returns one torch Adam."""
    found: dict[str, Any] = {}

    def build(config: Any, chunks: list[Any], config_overrides: Any) -> Any:
        found.update(config=config, chunks=chunks, overrides=config_overrides)
        adam = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1.0)
        return SimpleNamespace(optimizer=adam, param_groups=adam.param_groups)

    monkeypatch.setattr(model, "get_megatron_optimizer", build)
    return found


def rates(run: RunConfig, steps: int) -> list[float]:
    """The learning rate after so many steps, 0 among them."""
    made, scheduler = model.build_optimizer(run, [])
    (group,) = made.param_groups
    found = [group["lr"]]
    for _ in range(steps):
        scheduler.step(1)
        found.append(group["lr"])
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_setting_reaches_megatron(given: dict[str, Any], dtype: Any) -> None:
    settings = OptimizerConfig(
        lr=0.5, min_lr=0.25, beta1=0.7, beta2=0.8, eps=1e-3, weight_decay=0.3, clip_grad=2.0
    )
    run = RunConfig(
        data=DataConfig("x"),
        optimizer=settings,
        train=TrainConfig(dtype=dtype),
        parallel=ParallelConfig(
            distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        ),
    )
    chunks = [object()]
    made, scheduler = model.build_optimizer(run, chunks)
    c = given["config"]
    assert given["chunks"] is chunks and c.optimizer == "adam"
    assert (c.lr, c.min_lr, c.weight_decay, c.clip_grad) == (0.5, 0.25, 0.3, 2.0)
    assert (c.adam_beta1, c.adam_beta2, c.adam_eps) == (0.7, 0.8, 1e-3)
    assert c.use_distributed_optimizer and c.overlap_param_gather
    assert (c.bf16, c.params_dtype) == (
        (True, torch.bfloat16) if dtype == "bf16" else (False, torch.float32)
    )
    scheduler.step(50)
    assert made.param_groups[0]["weight_decay"] == 0.3, "it stays"


@pytest.mark.usefixtures("given")
def test_the_rate_rises_to_its_highest_and_falls_to_its_lowest() -> None:
    settings = OptimizerConfig(lr=1.0, min_lr=0.5, warmup_iters=2, decay_style="linear")
    run = RunConfig(data=DataConfig("x"), optimizer=settings, train=TrainConfig(iterations=6))
    expected = [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    assert rates(run, 7) == pytest.approx(expected)


@pytest.mark.usefixtures("given")
def test_the_decay_may_be_shorter_than_the_run_or_none() -> None:
    shorter = OptimizerConfig(lr=1.0, min_lr=0.0, decay_iters=2, decay_style="cosine")
    train = TrainConfig(iterations=100)
    run = RunConfig(data=DataConfig("x"), optimizer=shorter, train=train)
    assert rates(run, 3) == pytest.approx([1.0, 0.5, 0.0, 0.0])
    constant = OptimizerConfig(lr=1.0, min_lr=0.0, decay_style="constant")
    assert rates(RunConfig(data=DataConfig("x"), optimizer=constant, train=train), 3) == [1.0] * 4


@pytest.mark.usefixtures("given")
def test_a_resumed_schedule_follows_its_own_recipe() -> None:
    def made(lr: float) -> tuple[Any, Any]:
        settings = OptimizerConfig(lr=lr, min_lr=0.0, decay_style="constant")
        return model.build_optimizer(RunConfig(data=DataConfig("x"), optimizer=settings), [])

    _, saved = made(1.0)
    saved.step(7)
    resumed, scheduler = made(0.5)
    scheduler.load_state_dict(saved.state_dict())
    assert scheduler.num_steps == 7 and resumed.param_groups[0]["lr"] == 0.5


@pytest.mark.usefixtures("given")
@pytest.mark.parametrize("has_gpu", [True, False])
def test_adam_is_fused_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    made, _ = model.build_optimizer(RunConfig(data=DataConfig("x")), [])
    assert bool(made.param_groups[0]["fused"]) is has_gpu
