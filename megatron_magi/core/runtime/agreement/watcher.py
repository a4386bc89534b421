"""A thread that notices a disagreement while the host waits for the device.

With tensors on a GPU, an exchange starts before its comparison is done. If ranks disagree, the next
exchange raises. There may be no next exchange, because the host waits for the device, which waits
for rows that never arrive. Only another thread can then report the error and end the process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
GRACE_S = 5.0
"""Time between finding an error and ending the process, in which an exchange may raise it."""


class Watcher:
    """A thread that looks for errors that no call raises."""

    def __init__(self, errors: Callable[[], list[str]]) -> None:
        """``errors`` returns errors that were found and not raised yet; the thread calls it."""
        self._errors = errors
        self.ends_process = True
        """False: an error is only reported, since the process is restarted from within."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # groups are opened in threads, and each of them starts it

    def start(self) -> None:
        """Watch from now on; further calls change nothing."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="magi-watch", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread; called before the interpreter ends."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            try:
                found = self._errors()
            except Exception:
                logger.exception("looking for errors of exchanges failed, and goes on")
                continue
            if found and not self._stopped.wait(GRACE_S) and self._errors():
                self._report("; ".join(found))

    def _report(self, error: str) -> None:
        if not self.ends_process:
            logger.critical("AgreementError: %s. The device waits for an exchange.", error)
            return
        logger.critical(
            "AgreementError: %s. The device waits for an exchange that cannot end, so this process "
            "ends now.", error,
        )  # fmt: skip
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
