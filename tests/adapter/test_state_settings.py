"""Settings of layers with state that do not work."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_magi.adapter.state_settings import wrong_state_settings


@pytest.mark.parametrize(
    "signs, changed, texts",
    [
        ("", {"use_mamba_mem_eff_path": False}, []),
        ("MG", {}, []),
        ("M", {"hidden_size": None}, []),
        ("M", {"mamba_num_heads": 6}, ["multiple of .* = 4, got 6"]),
        ("M", {"mamba_num_heads": 8, "mamba_num_groups": 1}, ["mamba_num_groups must"]),
        ("G", {"linear_num_value_heads": 6}, ["linear_num_value_heads .* got 6"]),
    ],
)
def test_settings_that_do_not_work_are_named(
    signs: str, changed: dict[str, Any], texts: list[str]
) -> None:
    config: dict[str, Any] = {
        "hidden_size": 256,
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "mamba_num_groups": 8,
        "linear_num_value_heads": 8,
        **changed,
    }
    lines = wrong_state_settings(SimpleNamespace(**config), signs)
    assert len(lines) == len(texts), lines
    for line, text in zip(lines, texts, strict=True):
        assert re.search(text, line), line
