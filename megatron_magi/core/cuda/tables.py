"""Small tables on the device: uploaded once, without waiting, and used from any stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_magi.core.cuda.library import cuda_library, stream_handle


def upload(host: Tensor, device: torch.device | str) -> Tensor:
    """A copy on the device, through pinned memory. A copy from other memory would make the host
    wait for all work on the stream, and a new mask for every batch needs several copies."""
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        refuse_capture()
        if not host.is_pinned():
            host = host.pin_memory()
    return host.to(device, non_blocking=True)


def refuse_capture() -> None:
    """Refuse to upload tables into a CUDA graph, whose replays would copy from freed memory.

    Raises:
        RuntimeError: the current stream is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a mask's tables must be on the device before a CUDA graph is captured, and this call "
            "would upload them; make the same call, and its backward, once before the capture"
        )


@dataclass(eq=False)
class DeviceBuffer:
    """A tensor that was uploaded on one stream and may be read on others."""

    data: Tensor
    ready: torch.cuda.Event | None
    """Recorded after the upload; None on the CPU, and on "meta" for shapes alone."""
    streams: set[int] = field(default_factory=set)

    @classmethod
    def upload(cls, host: Tensor, device: torch.device) -> DeviceBuffer:
        """A copy of ``host``, without waiting for it."""
        with torch.inference_mode(False):  # so that later calls may save it for their backward
            if device.type != "cuda":
                return cls(host.to(device, copy=True), None)
            data = upload(host, device)
        stream = torch.cuda.current_stream(device)
        ready = torch.cuda.Event()
        ready.record(stream)
        return cls(data, ready, {stream.cuda_stream})

    def here(self) -> Tensor:
        """The data, for launches on the current stream."""
        if self.ready is not None:
            self.use_on(stream_handle(self.data.device))
        return self.data

    def use_on(self, handle: int) -> bool:
        """Make launches on the current stream, which has this handle, wait for the upload, and keep
        the data alive until they have run. Returns whether they are captured into a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():  # also on a stream that was used before
            self._use_in_graph()
            return True
        if handle not in self.streams:
            assert self.ready is not None, "there are no streams on the CPU"
            stream = torch.cuda.current_stream(self.data.device)
            stream.wait_event(self.ready)
            self.data.record_stream(stream)
            self.streams.add(handle)
        return False

    def _use_in_graph(self) -> None:
        """A graph may be replayed at any time, so the data stays until the process ends."""
        assert self.ready is not None
        if self not in _in_graphs:
            cuda_library().wait_outside_capture(self.ready.cuda_event)
            _in_graphs.append(self)


_in_graphs: list[DeviceBuffer] = []
"""Buffers that launches of captured CUDA graphs read."""


ALIGNMENT = 128
"""Bytes to which each of several tables in one buffer is aligned."""

_TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


@dataclass(frozen=True)
class DeviceTable:
    """One of several tables that lie in one buffer."""

    buffer: DeviceBuffer
    data: Tensor
    """A view of the buffer, in the table's dtype and shape."""

    def here(self) -> Tensor:
        """The table, for launches on the current stream."""
        self.buffer.here()
        return self.data

    @property
    def address(self) -> int:
        """The address on the device, also for a table without elements."""
        offset = int(self.data.storage_offset()) * self.data.element_size()
        return self.buffer.data.data_ptr() + offset


def upload_together(
    tables: Sequence[npt.NDArray[np.integer[Any]]], device: torch.device
) -> list[DeviceTable]:
    """Upload tables of int32 or int64 in one copy, without waiting for it.

    They are placed in one host buffer, which is pinned for a GPU and is itself the result on the
    CPU.
    """
    offsets = [0, *accumulate(-(-table.nbytes // ALIGNMENT) * ALIGNMENT for table in tables)]
    is_pinned = device.type == "cuda" and torch.cuda.is_available()
    if is_pinned:
        refuse_capture()
    with torch.inference_mode(False):  # so that later calls may save them for their backward
        size = max(offsets[-1], 1)
        host = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        for table, offset in zip(tables, offsets, strict=False):
            flat = np.ascontiguousarray(table).reshape(-1)
            host.numpy()[offset : offset + table.nbytes] = flat.view(np.uint8)
        is_host = device.type == "cpu"
        buffer = DeviceBuffer(host, None) if is_host else DeviceBuffer.upload(host, device)
        return [
            DeviceTable(buffer, _view(buffer.data[offset : offset + table.nbytes], table))
            for table, offset in zip(tables, offsets, strict=False)
        ]


def _view(data: Tensor, like: npt.NDArray[np.integer[Any]]) -> Tensor:
    return data.view(_TORCH_DTYPES[like.dtype]).view(like.shape)
