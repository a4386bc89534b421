"""SIGTERM and SIGINT become a request that the loop reads at the end of a step."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Inside the `with`, SIGTERM and the first SIGINT are noted; a second SIGINT interrupts."""

    def __init__(self) -> None:
        self.signal_number = 0
        """The number of the first signal that arrived; 0: none."""
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            for number in SIGNALS:
                self.previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.signal_number = self.signal_number or number
