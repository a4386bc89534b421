"""MagiConfig with the fields of its cost table beside its own."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from megatron_magi.config import CostTable, MagiConfig

OF_THE_TABLE = {field.name for field in fields(CostTable)}


def magi_config(**knobs: Any) -> MagiConfig:
    """Tests with small tiles or other rates need many of them."""
    table = {name: knobs.pop(name) for name in OF_THE_TABLE & knobs.keys()}
    return MagiConfig(**knobs, costs=CostTable(**table))


def with_trials(config: MagiConfig, swap_trials: int | None) -> MagiConfig:
    """The same config with another budget of the search."""
    return replace(config, costs=replace(config.costs, swap_trials=swap_trials))
