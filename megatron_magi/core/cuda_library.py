"""The CUDA library as Python sees it: ctypes mirrors of csrc/flex_attn/params.h."""

from __future__ import annotations

import ctypes
import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("megatron_magi")

ABI_VERSION = 5
DTYPE_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class CudaKernelError(RuntimeError):
    """A kernel could not be launched; the message says which and why."""


class TensorView(ctypes.Structure):
    """A strided [tokens, heads, head_dim] tensor on the device."""

    _fields_ = [("data", c_void_p), ("stride_token", c_int64), ("stride_head", c_int64)]

    @classmethod
    def of(cls, x: Tensor) -> TensorView:
        token, head, _ = x.stride()
        return cls(x.data_ptr(), token, head)


class FwdParams(ctypes.Structure):
    """MagiFwdParams."""

    _fields_ = [
        *((name, TensorView) for name in ("q", "k", "v", "out")),
        ("lse", c_void_p),
        ("lse_stride_token", c_int64),
        ("lse_stride_head", c_int64),
        *((name, c_void_p) for name in ("tiles", "entries", "empty_rows", "counter", "stream")),
        *(
            (name, c_int32)
            for name in (
                *("num_q", "num_k", "num_heads_q", "num_heads_kv", "head_dim"),
                *("dtype", "out_dtype", "merge", "num_tiles", "num_entries", "num_empty_ranges"),
                *("heads_per_section", "pack", "block_m", "block_n", "num_sms"),
            )
        ),
        ("softmax_scale", c_float),
    ]


_Message = ctypes.c_char * 512


class CudaLibrary:
    """A loaded library. Functions take a params struct and raise CudaKernelError."""

    def __init__(self, path: Path) -> None:
        # PyDLL keeps the GIL: a launch takes microseconds, and another thread cannot come between.
        self.handle = ctypes.PyDLL(str(path))
        version = self.handle.magi_abi_version()
        size = self.handle.magi_fwd_params_bytes()
        if version != ABI_VERSION or size != ctypes.sizeof(FwdParams):
            raise CudaKernelError(
                f"the CUDA library must have ABI {ABI_VERSION} with {ctypes.sizeof(FwdParams)} "
                f"bytes of forward parameters, got {version} with {size} from {path}; "
                f"rebuild with python -m megatron_magi.build --force"
            )

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

    def function(self, name: str) -> Any:
        """The raw ctypes function, for callers on the fast path."""
        return getattr(self.handle, name)


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
