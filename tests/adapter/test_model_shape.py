"""Heads and layers of a model, as plans need them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_magi.adapter.model_shape import head_shape
from tests.adapter.test_packed import model


def test_heads_of_one_tensor_parallel_rank() -> None:
    shape = head_shape(model(tensor_model_parallel_size=4, params_dtype=torch.bfloat16))
    assert (shape.num_heads_q, shape.num_heads_kv, shape.head_dim) == (1, 1, 4)
    assert shape.bytes_per_element == 2


def test_layers_are_numbered_once_each() -> None:
    from megatron_magi.adapter.model_shape import window_layers

    config = SimpleNamespace(
        num_layers=4, window_size=(3, 0), window_attn_skip_freq=2, mtp_num_layers=None
    )
    assert len(window_layers(config)) == 4
    config.mtp_num_layers = 2
    assert len(window_layers(config)) == 6
    config.window_attn_skip_freq = [1, 0, 1, 1]
    assert len(window_layers(config)) == 4
