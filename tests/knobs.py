"""MagiConfig with the fields of its cost table beside its own."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from megatron_magi.config import CostTable, MagiConfig

OF_THE_TABLE = {field.name for field in fields(CostTable)}


def magi_config(**knobs: Any) -> MagiConfig:
    """Tests with small tiles or other rates need many of them. With tiles of their own, loads
    are tiles: times are known of the kernel's own tiles alone."""
    if {"tile_q", "tile_k"} & knobs.keys():
        knobs.setdefault("num_sms", 0)
    table = {name: knobs.pop(name) for name in OF_THE_TABLE & knobs.keys()}
    return MagiConfig(**knobs, costs=CostTable(**table))


def tile_config(**knobs: Any) -> MagiConfig:
    """``magi_config`` without predicted times: a rank's load is its tiles, as tests count them."""
    return magi_config(**{"num_sms": 0, **knobs})


def with_trials(config: MagiConfig, swap_trials: int | None) -> MagiConfig:
    """The same config with another budget of the search."""
    return replace(config, costs=replace(config.costs, swap_trials=swap_trials))
