"""torch's Adam in its fused form, on the CPU, which has it too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_magi.adapter.adam_state import (
    _set_state_but_step,
    choose_update,
    is_fused,
    prepare_to_load,
)


def adam(fused: bool) -> tuple[SimpleNamespace, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(n, generator=generator).requires_grad_() for n in (3, 50)]
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW(parameters, lr=1e-2))
    choose_update(optimizer, fused)
    return optimizer, parameters


def step(optimizer: SimpleNamespace, parameters: list[torch.Tensor]) -> None:
    for p in parameters:
        p.grad = torch.sin(p.detach() * 7)
    optimizer.optimizer.step()


def test_fused_and_plain_updates_agree_and_can_follow_each_other() -> None:
    (fused, ours), (plain, baseline) = adam(True), adam(False)
    assert [g["fused"] for g in fused.optimizer.param_groups] == [True]
    assert is_fused(fused) is True and is_fused(plain) is False
    for turn in range(4):
        if turn == 2:  # as after loading the other kind's checkpoint
            choose_update(fused, False)
            choose_update(plain, True)
        step(fused, ours)
        step(plain, baseline)
        for a, b in zip(ours, baseline, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert {float(s["step"]) for s in fused.optimizer.state.values()} == {4.0}


def test_step_counts_are_kept_on_the_host_whatever_the_default_device() -> None:
    optimizer, parameters = adam(False)
    with torch.device("meta"):
        prepare_to_load(optimizer)
    step(optimizer, parameters)
    assert {float(s["step"]) for s in optimizer.optimizer.state.values()} == {1.0}


class Part:
    """What Megatron's distributed optimizer does with one parameter, which may be a leaf."""

    def __init__(self, main: torch.Tensor, count: float) -> None:
        groups, state = [{"params": [main]}], {main: {"step": torch.tensor(count)}}
        self.optimizer = SimpleNamespace(param_groups=groups, state=state)
        self.model_param_group_index_map = {main: (0, 0)}

    def _set_main_param_and_optimizer_states(self, main: torch.Tensor, tensors: Any) -> None:
        main.copy_(tensors["param"])
        self.optimizer.state[main]["step"] = tensors["step"]


@pytest.mark.parametrize("more", [{}, {"step": torch.tensor(0.0)}])
def test_a_loaded_step_count_stays(more: dict[str, torch.Tensor]) -> None:
    """A checkpoint in the layout of ranks brings the count that was there before the load."""
    main = torch.zeros(4, requires_grad=True)
    part = Part(main, 3.0)
    _set_state_but_step(part, main, {"param": torch.ones(4), **more})
    assert float(part.optimizer.state[main]["step"]) == 3 and (main == 1).all()
