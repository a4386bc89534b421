"""What a rule about Megatron's arguments is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_magi.config import MagiConfig

Rule = Callable[[Any, MagiConfig], Iterator[str]]
"""(Megatron's arguments, our config) -> one line for each refused setting."""
