"""Kinds of options that scripts share."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(low: int, multiple_of: int = 1) -> Callable[[str], int]:
    """A whole number of ``low`` or more, for an option."""

    def whole(text: str) -> int:
        if not text.isdecimal() or int(text) < low or int(text) % multiple_of:
            of = f", a multiple of {multiple_of}" if multiple_of > 1 else ""
            raise argparse.ArgumentTypeError(
                f"must be a whole number of {low} or more{of}, got {text}"
            )
        return int(text)

    return whole
