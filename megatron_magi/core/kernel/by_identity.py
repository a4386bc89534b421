"""Values that are kept with objects, by identity and for as long as the objects live."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class ByIdentity(Generic[V]):
    """A dictionary whose keys are objects themselves, not what they equal, and are not kept alive.

    ``torch.utils.weak.WeakIdKeyDictionary`` is one too; a lookup in it takes a few microseconds,
    which every attention call would pay several times.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def get(self, key: object) -> V | None:
        """The object's value, or None."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def __setitem__(self, key: object, value: V) -> None:
        number = id(key)

        def forget(ended: weakref.ref[Any]) -> None:
            entry = self._entries.get(number)
            if entry is not None and entry[0] is ended:
                del self._entries[number]

        self._entries[number] = weakref.ref(key, forget), value

    def __len__(self) -> int:
        return len(self._entries)
