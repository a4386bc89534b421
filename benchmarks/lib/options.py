"""Kinds of options that programs share. What they refuse is one line, before any measurement."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


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


def positive(text: str) -> float:
    """A number above 0, for an option."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """One or more of a kind, with commas between them."""
    return lambda text: [kind(part) for part in text.split(",")]


def one_of(words: Sequence[str]) -> Callable[[str], str]:
    """One of these words."""

    def known(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(words)}, got {text}")
        return text

    return known


def head_counts(text: str) -> list[int]:
    """Query heads and key/value heads, of which the latter divide the former."""
    counts = list_of(at_least(1))(text.replace("/", ","))
    if len(counts) != 2 or counts[0] % counts[1]:
        raise argparse.ArgumentTypeError(
            f"must be query heads and key/value heads that divide them, as 64,8 or 64/8, got {text}"
        )
    return counts


def new_file(text: str) -> Path:
    """A file to write, in a folder that exists: what was measured must not be lost."""
    path = Path(text)
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be a file that may be written, got {text}")
    return path
