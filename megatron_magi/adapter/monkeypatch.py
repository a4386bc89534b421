"""Replace a function by another one, even in modules that have already imported it by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def replace_everywhere(original: Any, replacement: Any, within: str = "") -> None:
    """Rebind every module attribute that is `original`, in all modules imported so far.

    A pretrain script and `megatron.training` import functions by `from ... import name`. In
    whatever order they were imported, all see the replacement; so do modules imported later.

    Args:
        within: Prefix of the names of the modules to search; default: all modules.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith(within):
            continue
        names = vars(module) if hasattr(module, "__dict__") else {}
        for bound in [bound for bound, value in names.items() if value is original]:
            setattr(module, bound, replacement)


def wrap_in_megatron(module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function of Megatron by wrap(function), in every Megatron module that has imported
    it. One that is wrapped already stays."""
    stock = getattr(module, name)
    if not hasattr(stock, "__wrapped__"):
        replace_everywhere(stock, wrap(stock), within="megatron.")
