"""The CUDA library: built on first use, loaded once, called with the structs of ``abi``."""

from __future__ import annotations

import ctypes
import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_int32, c_uint64, c_void_p
from pathlib import Path

import torch

from megatron_magi.core.cuda.abi import DTYPE_CODES, CudaKernelError, check_abi

logger = logging.getLogger("megatron_magi")

_Message = ctypes.c_char * 512


class CudaLibrary:
    """A loaded library. Functions take a params struct and raise CudaKernelError."""

    def __init__(self, path: Path) -> None:
        # PyDLL keeps the GIL: a launch takes microseconds, and another thread cannot come between.
        self.handle = ctypes.PyDLL(str(path))
        check_abi(self.handle, path)

    def call(self, name: str, params: ctypes.Structure) -> None:
        """Run a function of the C ABI."""
        message = _Message()
        code = getattr(self.handle, name)(ctypes.byref(params), message, len(message))
        if code != 0:
            raise CudaKernelError(f"{name} failed with code {code}: {message.value.decode()}")

    def load_kernels(self, dtype: torch.dtype) -> int:
        """Load what a model of this dtype launches onto the current device; returns how many."""
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


@functools.lru_cache(maxsize=1)
def cuda_library() -> CudaLibrary:
    """The library, built on first use if need be (see megatron_magi/build.py)."""
    from megatron_magi.build import library_path

    return CudaLibrary(library_path())


def load_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Load the kernels for this dtype, once per device and process.

    The driver would load each one at its first launch and make the host wait meanwhile for all that
    the GPU has to do, in the middle of the first step.

    Raises:
        CudaBuildError, CudaKernelError: no library, or one that does not run here.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    _load_kernels_once(index, dtype)


@functools.cache
def _load_kernels_once(device_index: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda", device_index)
    with on_device(device):
        torch.empty(1, device=device)  # the device has a context from here on
        num_loaded = cuda_library().load_kernels(dtype)
    logger.info("%d attention kernels for %s loaded onto %s", num_loaded, dtype, device)


def loaded_cuda_library(device: torch.device) -> CudaLibrary | None:
    """The library if a kernel backend has loaded it and its kernels run there; never builds it."""
    if device.type != "cuda" or cuda_library.cache_info().currsize == 0:
        return None
    return cuda_library() if _capability(device.index) == (9, 0) else None


@functools.lru_cache(maxsize=64)
def _capability(device_index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def stream_handle(device: torch.device) -> int:
    """The current cudaStream_t, without the Stream object that takes microseconds to make."""
    if _raw_stream is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # what Triton's launcher calls


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to the current device; to switch costs microseconds, so only where needed."""
    if torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)
