"""Whether the numbers of a recipe's section are of their fields' types, and finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

from megatron_magi.checks import is_bool, is_integer_like, shown


def misfits(section: str, values: Any) -> Iterator[str]:
    """A sentence for every bool, int or float field (or tuple of such) that holds something else.

    Args:
        values: One dataclass of a ``RunConfig``, which a file has filled or a caller.
    """
    for name, hint in get_type_hints(type(values)).items():
        kinds = {hint, *get_args(hint)}
        value = getattr(values, name)
        if value is None and type(None) in kinds:
            continue
        for item in value if isinstance(value, (tuple, list)) else (value,):
            wanted = next((w for kind, w, fits in _KINDS if kind in kinds and not fits(item)), None)
            if wanted:
                yield f"{section}.{name} must be {wanted}, got {shown(item)}; mend the recipe"


def _is_whole(value: Any) -> bool:
    return is_integer_like(value) and not is_bool(value)


def _is_finite(value: Any) -> bool:
    return (isinstance(value, float) or _is_whole(value)) and math.isfinite(value)


_KINDS: tuple[tuple[type, str, Callable[[Any], bool]], ...] = (
    (bool, "true or false", is_bool),
    (int, "a whole number", _is_whole),
    (float, "a finite number", _is_finite),
)
