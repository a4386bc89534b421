"""What is derived from a plan or a token layout on first use."""

from __future__ import annotations

from typing import Any


class Kept:
    """Shared by a value and its copies; no part of the value.

    PyTorch's FSDP and DDP in mixed precision rebuild every dataclass that they find among a model's
    inputs from its fields, and go into dictionaries and lists. They hand an object of a class like
    this one on as it is, so the copy need not derive everything again.
    """

    def __init__(self) -> None:
        self.of: tuple[Any, ...] | None = None
        """The fields that it was derived from, or their digests; None before the first use."""
        self.rank_plans: dict[int, Any] = {}
        """A plan's view of each rank."""
        self.prepared: dict[Any, Any] = {}
        """What devices hold; core/runtime/prepared.py fills it."""


def kept_of(given: Kept, value: tuple[Any, ...]) -> Kept:
    """The given one for a new value or for a copy of its own, else another one.

    Args:
        value: what the owner's derived things depend on.
    """
    kept = given if given.of in (None, value) else Kept()
    kept.of = value
    return kept
