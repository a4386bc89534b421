"""Put a function in another's place, also where it was imported by name already."""

from __future__ import annotations

import sys
from typing import Any


def replace_everywhere(original: Any, replacement: Any) -> None:
    """Rebind every module attribute that is `original`, in all modules imported so far.

    A pretrain script and `megatron.training` take functions by `from ... import name`. Whichever of
    them was imported first, all see the replacement; modules imported later take it themselves.
    """
    for module in list(sys.modules.values()):
        names = vars(module) if hasattr(module, "__dict__") else {}
        for name, value in list(names.items()):
            if value is original:
                setattr(module, name, replacement)
