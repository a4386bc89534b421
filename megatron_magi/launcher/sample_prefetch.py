"""An iterator that draws its samples before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

NUM_AHEAD = 2
"""Samples of a data loader that are drawn, and planned, before their microbatch."""


class DrawnAhead:
    """The samples of an iterator in its order, each shown to `see` as soon as it is drawn.

    Samples are drawn in the thread that asks for them. What the iterator raises, also at its end,
    or `see`, is raised in the place of the sample that it would have been.
    """

    def __init__(
        self, samples: Iterator[Any], see: Callable[[Any], None], depth: int = NUM_AHEAD
    ) -> None:
        self._samples, self._see, self._depth = samples, see, depth
        self._drawn: deque[Any] = deque()
        self._raised: Exception | None = None

    def __iter__(self) -> DrawnAhead:
        return self

    def __getattr__(self, name: str) -> Any:
        """Attributes of the samples' own iterator, such as the position that Megatron saves."""
        if name.startswith("_"):  # this object's own, before it has them
            raise AttributeError(name)
        return getattr(self._samples, name)

    def peek(self) -> Any:
        """The sample that comes next; None if there is none, or an error."""
        if not self._drawn and self._raised is None:
            self._draw()
        return self._drawn[0] if self._drawn else None

    def __next__(self) -> Any:
        while len(self._drawn) <= self._depth and self._raised is None:
            self._draw()
        if self._drawn:
            return self._drawn.popleft()
        assert self._raised is not None, "drawing ends with a sample or an error"
        error, self._raised = self._raised, None
        raise error

    def _draw(self) -> None:
        try:
            sample = next(self._samples)
            self._see(sample)
        except Exception as error:  # StopIteration too
            self._raised = error
        else:
            self._drawn.append(sample)
