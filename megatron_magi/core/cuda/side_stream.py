"""A stream with priority over the one that a caller works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from megatron_magi.core.cuda.library import cuda_library, stream_handle


class SideStream:
    """A stream of a device, and an event by which it and the current stream follow each other.

    torch.cuda's own way creates events and stream objects at every turn, which takes several times
    as long on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._event = torch.cuda.Event()
        self._event.record(self.stream)  # which creates it
        self._joined: int | None = None
        """The stream that joined last: it may still read memory of this one."""

    @contextmanager
    def current(self) -> Iterator[None]:
        """Work given in this block runs after what the current stream has been given so far."""
        before = torch.cuda.current_stream(self.device)
        handle = self.stream.cuda_stream
        follow, event = cuda_library().follow, self._event.cuda_event
        follow(handle, before.cuda_stream, event)
        if self._joined not in (None, before.cuda_stream):
            follow(handle, self._joined, event)
        torch.cuda.set_stream(self.stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(before)

    def join(self) -> None:
        """Let the current stream wait for what this one has been given so far."""
        here = stream_handle(self.device)
        cuda_library().follow(here, self.stream.cuda_stream, self._event.cuda_event)
        self._joined = here


@lru_cache
def side_stream(device: torch.device) -> SideStream:
    """The one of a device in this process."""
    return SideStream(device)
