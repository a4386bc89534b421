"""Small tables on the device: uploaded once, without waiting, and used from any stream."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_magi.core.cuda_library import stream_handle


def upload(host: Tensor, device: torch.device | str) -> Tensor:
    """A copy on the device. From memory that is not pinned the host would wait for all work on the
    stream, and with a new mask for every batch there are several copies."""
    if torch.device(device).type == "cuda" and torch.cuda.is_available() and not host.is_pinned():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@dataclass
class DeviceBuffer:
    """A tensor that was uploaded on one stream and may be read on others."""

    data: Tensor
    ready: torch.cuda.Event | None
    """When it is there; None on the CPU."""
    streams: set[int] = field(default_factory=set)

    @classmethod
    def upload(cls, host: Tensor, device: torch.device) -> DeviceBuffer:
        """A copy of ``host``, without waiting for it."""
        with torch.inference_mode(False):  # later calls save it for their backward
            if device.type != "cuda":
                return cls(host.clone(), None)
            data = upload(host, device)
        stream = torch.cuda.current_stream(device)
        ready = torch.cuda.Event()
        ready.record(stream)
        return cls(data, ready, {stream.cuda_stream})

    def here(self) -> Tensor:
        """The data, for what is launched on the current stream."""
        if self.ready is not None:
            self.use_on(stream_handle(self.data.device))
        return self.data

    def use_on(self, handle: int) -> None:
        """Make the current launch on the current stream, which has this handle, see the data, and
        the data outlive the launch."""
        if handle not in self.streams:
            assert self.ready is not None, "there are no streams on the CPU"
            stream = torch.cuda.current_stream(self.data.device)
            stream.wait_event(self.ready)
            self.data.record_stream(stream)
            self.streams.add(handle)
