"""Replace a function by another one, even in modules that have already imported it by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

LIBRARIES = {"torch", "sympy", "numpy"}
"""They have most modules of a run, and import nothing that is replaced here."""


class Swap(NamedTuple):
    """An object, and the one that takes its place in every module."""

    original: Any
    replacement: Any


def replace_everywhere(*swaps: Swap, within: str = "") -> None:
    """Rebind every module attribute that is an original, in all modules imported so far.

    A pretrain script and `megatron.training` import functions by `from ... import name`. In
    whatever order they were imported, all see the replacement; so do modules imported later.

    Args:
        swaps: In one pass; none may replace another one's replacement.
        within: Prefix of the names of the modules to search; default: all but LIBRARIES.
    """
    replacements = {id(swap.original): swap.replacement for swap in swaps}
    for name, module in list(sys.modules.items()):
        if not name.startswith(within) or name.partition(".")[0] in LIBRARIES:
            continue
        names = vars(module) if hasattr(module, "__dict__") else {}
        if replacements.keys().isdisjoint(map(id, names.values())):
            continue
        for bound in [bound for bound, value in names.items() if id(value) in replacements]:
            setattr(module, bound, replacements[id(names[bound])])


def wrap_in_megatron(module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function of Megatron by wrap(function), in every Megatron module that has imported
    it. One that is wrapped already stays."""
    stock = getattr(module, name)
    if not hasattr(stock, "__wrapped__"):
        replace_everywhere(Swap(stock, wrap(stock)), within="megatron.")
