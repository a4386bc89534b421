"""Small tables on the device: uploaded once, without waiting, and used from any stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_magi.core.cuda.library import stream_handle


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


ALIGNMENT = 128
"""Bytes to which each of several tables in one buffer is aligned."""


def upload_together(
    tables: Sequence[npt.NDArray[np.int32]], device: torch.device
) -> tuple[DeviceBuffer, list[int]]:
    """int32 tables in one buffer, by one upload, and their addresses."""
    unit = ALIGNMENT // 4
    offsets = np.cumsum([0] + [-(-table.size // unit) * unit for table in tables]).tolist()
    host = np.zeros(max(offsets[-1], 1), dtype=np.int32)
    for table, offset in zip(tables, offsets[:-1], strict=True):
        host[offset : offset + table.size] = table.ravel()
    buffer = DeviceBuffer.upload(torch.from_numpy(host), device)
    base = buffer.data.data_ptr()
    return buffer, [base + 4 * offset for offset in offsets[:-1]]
