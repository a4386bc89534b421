"""Put a function in another's place, also where it was imported by name already."""

from __future__ import annotations

import sys
from typing import Any


def replace_everywhere(original: Any, replacement: Any, within: str = "") -> None:
    """Rebind every module attribute that is `original`, in all modules imported so far.

    A pretrain script and `megatron.training` take functions by `from ... import name`. Whichever of
    them was imported first, all see the replacement; modules imported later take it themselves.

    Args:
        within: How the names of the modules begin that are looked at; default: all.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith(within):
            continue
        names = vars(module) if hasattr(module, "__dict__") else {}
        for bound, value in list(names.items()):
            if value is original:
                setattr(module, bound, replacement)
