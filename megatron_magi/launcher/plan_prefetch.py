"""Plans that a thread makes before their microbatch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key")
Made = TypeVar("Made")

NUM_WAITING = 32
"""Plans that nobody has taken; older ones are dropped (their samples were skipped)."""


class PlansAhead(Generic[Key, Made]):
    """Values by key, made one after the other in one thread; only the main thread calls this.

    The thread uses the main thread's GPU and stream. The main thread launches nothing that reads a
    value before it has taken it, so that uploads come first on the stream.
    """

    def __init__(self, make: Callable[[Key], Made]) -> None:
        self._make = make
        self._pool: ThreadPoolExecutor | None = None
        self._futures: dict[Key, Future[Made]] = {}

    def begin(self, key: Key) -> None:
        """Have the value made, unless it is under way."""
        if key in self._futures:
            return
        if self._pool is None:
            self._pool = _one_thread()
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        self._futures[key] = self._pool.submit(self._make_on, stream, key)
        if len(self._futures) > NUM_WAITING:
            self._futures.pop(next(iter(self._futures))).cancel()

    def take(self, key: Key) -> Made | None:
        """The value, which is then forgotten; None if it was not begun.

        Raises:
            Exception: whatever making it raised.

        Cost: waits until it is made.
        """
        future = self._futures.pop(key, None)
        return None if future is None else future.result()

    def end(self) -> None:
        """Make nothing more; what is under way ends by itself."""
        self._futures.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _make_on(self, stream: torch.cuda.Stream | None, key: Key) -> Made:
        with torch.cuda.stream(stream):  # None: no GPU
            return self._make(key)


def _one_thread() -> ThreadPoolExecutor:
    """On this thread's GPU from its beginning: to leave another stream on the first GPU would make
    every rank take memory there."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(1, "magi-plans")
    device = torch.cuda.current_device()
    return ThreadPoolExecutor(1, "magi-plans", torch.cuda.set_device, (device,))
