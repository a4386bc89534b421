"""Recipes of quantization: classes that Megatron derives from or compares with, without effect."""

from __future__ import annotations

import enum
from typing import Any


class Format(enum.Enum):
    """Number formats of fp8."""

    E4M3 = 0
    E5M2 = 1
    HYBRID = 2


class Recipe:
    """Any recipe; keeps what it was built with."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings


class DelayedScaling(Recipe):
    """Scales from a history of maxima."""


class Float8CurrentScaling(Recipe):
    """Scales of the present tensor."""


class Float8BlockScaling(Recipe):
    """Scales of blocks."""


class MXFP8BlockScaling(Recipe):
    """Scales of blocks of 32."""


class NVFP4BlockScaling(Recipe):
    """Scales of blocks of four-bit numbers."""
