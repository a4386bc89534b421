"""One public callable of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.edge.kinds import Kind


@dataclass(frozen=True)
class Call:
    """A callable, arguments that it takes, and the kinds of those that are checked."""

    name: str
    """Of the callable in its module; "Class.method" for a method of ``function``'s object."""
    function: Callable[..., Any]
    good: dict[str, Any]
    kinds: dict[str, Kind]
    free: tuple[str, ...] = ()
    """Parameters that take anything: they have no effect, or only another library judges them."""
    words: dict[str, str] = field(default_factory=dict)
    """What errors call a parameter, where not by its name."""
