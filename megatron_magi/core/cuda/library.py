"""The CUDA library: built on first use, loaded once, called with the structs of ``abi``."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_int32, c_uint64, c_void_p
from pathlib import Path

import torch

from megatron_magi.core.cuda.abi import DTYPE_CODES, CudaKernelError, ParamTemplate, check_abi
from megatron_magi.core.native import solver

logger = logging.getLogger("megatron_magi")

_MESSAGE_BYTES = 512
_Message = ctypes.c_char * _MESSAGE_BYTES


class CudaLibrary:
    """A loaded library. Its functions take a params struct and raise CudaKernelError."""

    def __init__(self, path: Path) -> None:
        # PyDLL keeps the GIL: most calls take microseconds, and no other thread should interrupt
        # them. Calls by `prepared`, which may wait for the device, leave it to others.
        self.handle = ctypes.PyDLL(str(path))
        check_abi(self.handle, path)

    def call(self, name: str, params: ctypes.Structure) -> None:
        """Run a function of the C ABI on the struct itself."""
        message = _Message()
        code = getattr(self.handle, name)(ctypes.byref(params), message, _MESSAGE_BYTES)
        if code != 0:
            raise CudaKernelError(f"{name} failed with code {code}: {message.value.decode()}")

    def prepared(self, name: str, pattern: ParamTemplate) -> Callable[..., None]:
        """A function of the C ABI that takes what ``pattern.filled`` takes: the way of every call
        whose struct is known but for a few fields. It takes a fifth of the time of ``call``."""
        address = ctypes.cast(getattr(self.handle, name), c_void_p).value
        assert address is not None, "the library has the function"
        return solver.prepared_call(name, address, pattern.params, pattern.fields, CudaKernelError)

    def load_kernels(self, dtype: torch.dtype) -> int:
        """Load the kernels for a dtype onto the current device, and return how many there are."""
        message, num_loaded = _Message(), c_int32(0)
        code = self.handle.magi_load_kernels(
            c_int32(DTYPE_CODES[dtype]), ctypes.byref(num_loaded), message, len(message)
        )
        if code != 0:
            raise CudaKernelError(
                f"magi_load_kernels failed with code {code}: {message.value.decode()}"
            )
        return num_loaded.value

    def pause(self, nanoseconds: int, stream: int) -> None:
        """Keep a stream of the current device waiting."""
        code = self.handle.magi_pause(c_uint64(nanoseconds), c_void_p(stream))
        if code != 0:
            raise CudaKernelError(f"magi_pause failed with code {code}")

    def wait_event(self, stream: int, event: int) -> None:
        """Let later work on a stream wait for an event; both are handles."""
        code = self.handle.magi_wait_event(c_void_p(stream), c_void_p(event))
        if code != 0:
            raise CudaKernelError(f"magi_wait_event failed with code {code}")

    def follow(self, later: int, earlier: int, event: int) -> None:
        """Let later work on one stream wait for earlier work on another; handles, and that of an
        event to use for it."""
        code = self.handle.magi_follow(c_void_p(later), c_void_p(earlier), c_void_p(event))
        if code != 0:
            raise CudaKernelError(f"magi_follow failed with code {code}")

    def is_done(self, event: int) -> bool:
        """True if an event has been reached; any thread may ask, also while another one captures a
        CUDA graph."""
        answer = c_int32(0)
        code = self.handle.magi_event_is_done(c_void_p(event), ctypes.byref(answer))
        if code != 0:
            raise CudaKernelError(f"magi_event_is_done failed with code {code}")
        return bool(answer.value)

    def wait_outside_capture(self, event: int) -> None:
        """Let the host wait for an event while a stream is captured into a CUDA graph."""
        code = self.handle.magi_wait_outside_capture(c_void_p(event))
        if code != 0:
            raise CudaKernelError(f"magi_wait_outside_capture failed with code {code}")


@functools.lru_cache(maxsize=1)
def cuda_library() -> CudaLibrary:
    """The library, built on first use if necessary (see megatron_magi/build.py)."""
    from megatron_magi.build import library_path

    return CudaLibrary(library_path())


def load_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Load the kernels for this dtype, once per device and process.

    Otherwise the driver loads each one at its first launch, in the middle of the first step, and
    the host waits meanwhile for all work that is queued on the GPU.

    Raises:
        CudaBuildError, CudaKernelError: no library, or one that does not run here.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    _load_kernels_once(index, dtype)


@functools.cache
def _load_kernels_once(device_index: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda", device_index)
    with on_device(device):
        torch.empty(1, device=device)  # creates the device's context
        num_loaded = cuda_library().load_kernels(dtype)
    logger.info("%d attention kernels for %s loaded onto %s", num_loaded, dtype, device)


def loaded_cuda_library(device: torch.device) -> CudaLibrary | None:
    """The library if a kernel backend has loaded it and its kernels run on the device, or None; it
    is never built here."""
    if device.type != "cuda" or cuda_library.cache_info().currsize == 0:
        return None
    return cuda_library() if _capability(device.index) == (9, 0) else None


@functools.lru_cache(maxsize=64)
def _capability(device_index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def stream_handle(device: torch.device) -> int:
    """The current cudaStream_t, without a Stream object, which takes microseconds to create."""
    if _raw_stream is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # what Triton's launcher calls


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which launches go to ``device``. Switching costs microseconds, so it happens
    only if the device is not the current one."""
    if _current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)


_HERE: AbstractContextManager[object] = nullcontext()
# Without the look whether CUDA has been initialised, which torch.cuda.current_device takes.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
