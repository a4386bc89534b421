"""Gradients of FSDP2 are divided by the tokens of all ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_magi.launcher import fsdp2


def test_the_mean_over_the_group_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 has averaged over the ranks of its own group, and Megatron's factor is for a sum."""
    group, layer = object(), torch.nn.Linear(2, 3)
    monkeypatch.setattr(fsdp2.dist, "get_world_size", {group: 4}.__getitem__)
    layer.weight.grad = torch.full((3, 2), 8.0)  # and the bias has none
    wrapper = SimpleNamespace(module=layer, process_group=group)
    fsdp2.replace_scale_gradients(lambda self, scaling_factor: None, None)(wrapper, 1 / 16)
    assert (layer.weight.grad == 2.0).all() and layer.bias.grad is None
