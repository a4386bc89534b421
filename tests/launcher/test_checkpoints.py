"""Saving and resuming with torch's Adam, and without a process that writes."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_magi.adapter.adam_state import choose_update
from megatron_magi.config import MagiConfig
from megatron_magi.launcher.checkpoints import wrap_load_checkpoint, wrap_save_checkpoint
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.session import LauncherState

LAUNCH = LauncherState(LauncherOptions(MagiConfig()))


def optimizer_of(fused: bool) -> Any:
    """A Megatron optimizer with torch's Adam in it, before its first step."""
    parameters = [torch.zeros(n, requires_grad=True) for n in (3, 5)]
    made = SimpleNamespace(optimizer=torch.optim.AdamW(parameters, lr=1e-2))
    choose_update(made, fused)
    return made


class Megatron:
    """`load_checkpoint`, as far as the optimizer goes, of a run that updated in the other way."""

    def __init__(self, saved_fused: bool) -> None:
        self.saved_fused = saved_fused
        self.described: list[set[str]] = []

    def load_checkpoint(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """All parameters share one count, which every parameter's update raises."""
        adam = optimizer.optimizer
        self.described = [set(adam.state[p]) for p in adam.param_groups[0]["params"]]
        adam.param_groups[0].update(
            fused=self.saved_fused or None, foreach=False if self.saved_fused else None
        )
        count = torch.tensor(7.0)
        for state in adam.state.values():
            state["step"] = count
        return model, args, kwargs


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_adam_goes_on_where_it_was_saved(fused: bool) -> None:
    optimizer, megatron = optimizer_of(fused), Megatron(not fused)
    load = wrap_load_checkpoint(megatron.load_checkpoint, LAUNCH)
    assert load("model", optimizer, "scheduler", strict=True) == (
        "model", ("scheduler",), {"strict": True}
    )  # fmt: skip
    assert megatron.described == [{"step", "exp_avg", "exp_avg_sq"}] * 2, "there before it is read"
    adam = optimizer.optimizer
    assert bool(adam.param_groups[0]["fused"]) is fused, "this run's way, not the saved run's"
    for p in adam.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    adam.step()
    assert [float(state["step"]) for state in adam.state.values()] == [8.0, 8.0]


def test_without_an_optimizer_megatron_loads_alone() -> None:
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    load = wrap_load_checkpoint(load_checkpoint, LAUNCH)
    assert load("model", None, 3, strict=False) == (("model", None, 3), {"strict": False})


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("before", [None, queue.Queue()], ids=["no queue", "one in process"])
def test_a_synchronous_save_reports_through_a_queue_in_this_process(
    is_async: bool, before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there before Megatron looks for it, and starts no manager; an asynchronous save finds
    none and makes one that reaches its process."""
    monkeypatch.setattr(filesystem_async, "_results_queue", before, raising=False)

    def save_checkpoint(iteration: int, model: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = type(None) if is_async else queue.Queue
        assert type(filesystem_async._results_queue) is wanted
        return iteration, model, args, kwargs

    launch = LauncherState(LauncherOptions(MagiConfig()), args=SimpleNamespace(async_save=is_async))
    save = wrap_save_checkpoint(save_checkpoint, launch)
    assert save(5, "model", "more", flops=1) == (5, "model", ("more",), {"flops": 1})
