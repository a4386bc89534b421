"""The library's functions are called with their structs, and what fails is an error with a name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_magi import build
from megatron_magi.core.cuda import library as module
from megatron_magi.core.cuda.abi import ABI_VERSION, SIZES, CudaKernelError, Rows
from megatron_magi.core.cuda.library import CudaLibrary, cuda_library, loaded_cuda_library

GPU = torch.device("cuda", 0)


def answering(value: int) -> Callable[..., int]:
    return lambda *_: value


class Handle(SimpleNamespace):
    """In place of a loaded shared object: Python functions under the names of the C ABI."""

    def __init__(self, **functions: Callable[..., int]) -> None:
        sizes = {f"magi_{name}_params_bytes": answering(size) for name, size in SIZES.items()}
        super().__init__(**{"magi_abi_version": answering(ABI_VERSION), **sizes, **functions})


def failing(*arguments: Any) -> int:
    """Code 3, and the reason in the buffer before the last argument."""
    message, size = arguments[-2:]
    assert ctypes.sizeof(message) == size
    message.value = b"no kernel image"
    return 3


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths that are loaded; every one of them is a library of these sources."""
    seen: list[str] = []

    def load(path: str) -> Handle:
        seen.append(path)
        return Handle()

    monkeypatch.setattr(ctypes, "PyDLL", load)
    cuda_library.cache_clear()
    module._capability.cache_clear()
    yield seen
    cuda_library.cache_clear()
    module._capability.cache_clear()


def library(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., int]) -> CudaLibrary:
    monkeypatch.setattr(ctypes, "PyDLL", lambda path: Handle(**functions))
    return CudaLibrary(Path("lib.so"))


def test_a_library_of_other_sources_is_refused_when_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CudaKernelError, match=r"must have ABI .* from lib\.so; rebuild"):
        library(monkeypatch, magi_abi_version=answering(ABI_VERSION + 1))


def test_a_call_gets_the_struct_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a copy of it: a launch writes what it chose where the caller reads it."""

    def halve(params: Any, message: Any, size: int) -> int:
        params._obj.stride //= 2
        return 0

    rows = Rows(stride=34)
    library(monkeypatch, magi_halve=halve).call("magi_halve", rows)
    assert rows.stride == 17


def test_a_call_that_fails_says_which_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    made = library(
        monkeypatch, magi_move=failing, magi_load_kernels=failing, magi_pause=answering(4)
    )
    with pytest.raises(CudaKernelError, match=r"^magi_move failed with code 3: no kernel image$"):
        made.call("magi_move", Rows())
    with pytest.raises(CudaKernelError, match=r"^magi_load_kernels failed with code 3: no kernel"):
        made.load_kernels(torch.bfloat16)
    with pytest.raises(CudaKernelError, match=r"^magi_pause failed with code 4$"):
        made.pause(1, 0)


@pytest.mark.parametrize("dtype, code", [(torch.bfloat16, 0), (torch.float16, 1)])
def test_kernels_are_loaded_by_dtype_and_counted(
    dtype: torch.dtype, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(kind: ctypes.c_int32, count: Any, message: Any, size: int) -> int:
        count._obj.value = 18 + 10 * kind.value
        return 0

    assert library(monkeypatch, magi_load_kernels=load).load_kernels(dtype) == 18 + 10 * code


def test_a_pause_has_64_bits_of_nanoseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    made = library(monkeypatch, magi_pause=lambda *given: seen.extend(x.value for x in given) or 0)
    made.pause(2**40 + 5, 2**50 + 7)
    assert seen == [2**40 + 5, 2**50 + 7]


def test_the_library_is_found_and_loaded_once(
    loading: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "library_path", lambda: Path("built.so"))
    assert cuda_library() is cuda_library() and loading == ["built.so"]


def test_who_only_asks_for_a_loaded_library_never_builds_one(
    loading: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "library_path", lambda: Path("built.so"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert loaded_cuda_library(GPU) is None and loading == []
    made = cuda_library()
    assert loaded_cuda_library(GPU) is made
    assert loaded_cuda_library(torch.device("cpu")) is None


@pytest.mark.parametrize("capability", [(8, 0), (9, 1), (10, 0), (12, 0)])
def test_a_device_that_the_kernels_do_not_run_on_has_no_library(
    capability: tuple[int, int], loading: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two GPUs in one machine, each is asked for its own."""
    monkeypatch.setattr(build, "library_path", lambda: Path("built.so"))
    of_index = {0: (9, 0), 1: capability}
    monkeypatch.setattr(torch.cuda, "get_device_capability", of_index.__getitem__)
    made = cuda_library()
    assert loaded_cuda_library(torch.device("cuda", 1)) is None
    assert loaded_cuda_library(GPU) is made


def test_the_stream_is_the_current_one_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_raw_stream", lambda index: 100 + index)
    assert module.stream_handle(torch.device("cuda", 3)) == 103
    monkeypatch.setattr(module, "_raw_stream", None)  # a PyTorch without that function
    streams = {3: SimpleNamespace(cuda_stream=203)}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device.index])
    assert module.stream_handle(torch.device("cuda", 3)) == 203


def test_the_device_is_switched_only_if_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: f"switched to {device}")
    assert isinstance(module.on_device(torch.device("cuda", 1)), nullcontext)
    assert module.on_device(GPU) == "switched to cuda:0"


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(module, "_load_kernels_once", lambda *what: loaded.append(what))
    module.load_kernels(torch.device("cuda"), torch.float16)
    module.load_kernels(GPU, torch.float16)
    assert loaded == [(2, torch.float16), (0, torch.float16)]
