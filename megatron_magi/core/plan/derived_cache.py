"""Cache of values derived from a plan or a token layout."""

from __future__ import annotations

from typing import Any

from megatron_magi.checks import instance


class DerivedCache:
    """Shared by a value and the equal copies that `dataclasses.replace` makes; not part of it.

    PyTorch's FSDP in mixed precision rebuilds every dataclass among a model's inputs so, and goes
    into dictionaries and lists. An object that is neither stays the same one, so that a copy need
    not derive everything again.
    """

    def __init__(self) -> None:
        self.of: int | None = None
        """The digest of all fields that it was derived from; None before the first use."""
        self.rank_plans: dict[int, Any] = {}
        """A plan's view of each rank."""
        self.prepared: dict[Any, Any] = {}
        """Device tables; core/runtime/prepared.py fills it."""


def check_cache(value: object) -> None:
    """Refuse what cannot keep anything."""
    instance(value, DerivedCache, "_kept", "leave it out")


def cache_of(given: DerivedCache, digest: int) -> DerivedCache:
    """The given one for a new value or for a copy of its own, else another one.

    Args:
        digest: of all that the owner's derived things depend on.

    Raises:
        TypeError: something else than a DerivedCache.
    """
    check_cache(given)
    kept = given if given.of in (None, digest) else DerivedCache()
    kept.of = digest
    return kept
