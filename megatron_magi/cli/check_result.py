"""Result of a check of the machine, and helpers of several checks."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any, Literal

from megatron_magi.requirements import MissingRequirement, check_package


@dataclass(frozen=True)
class Check:
    """The finding and its remedy."""

    name: str
    status: Literal["ok", "absent", "problem"]
    """absent: not installed, and the rest runs without it."""
    found: str
    advice: str = ""


def torch_or_none() -> Any:
    """torch, or None if it is missing."""
    try:
        return check_package("torch")
    except MissingRequirement:
        return None


def has_gpu() -> bool:
    torch = torch_or_none()
    return torch is not None and bool(torch.cuda.is_available())


def installed(name: str) -> str | None:
    """The version of an installed package; None if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
