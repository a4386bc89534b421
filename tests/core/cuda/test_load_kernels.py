"""Our kernels are loaded when a backend is chosen, not in the middle of the first step."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_magi import build
from megatron_magi.core.cuda import library as cuda_library
from megatron_magi.core.kernel.head_dims import COMPILED_WIDTHS
from megatron_magi.core.kernel.select import choose_backend_name, select_backend

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.dtype]]:
    """(device, dtype) of every load, on a machine that pretends to have Hopper GPUs."""
    seen: list[tuple[int, torch.dtype]] = []
    current = [0]

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.device.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    def load(dtype: torch.dtype) -> int:
        seen.append((current[0], dtype))
        return 18

    cuda_library._load_kernels_once.cache_clear()
    select_backend.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(cuda_library, "_current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(cuda_library, "cuda_library", lambda: SimpleNamespace(load_kernels=load))
    yield seen
    cuda_library._load_kernels_once.cache_clear()
    select_backend.cache_clear()


def test_once_per_device_and_dtype(loads: list[tuple[int, torch.dtype]]) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for device, dtype in ((first, BF16), (torch.device("cuda"), BF16), (second, BF16),
                          (first, FP16), (second, BF16)):  # fmt: skip
        cuda_library.load_kernels(device, dtype)
    assert loads == [(0, BF16), (1, BF16), (0, FP16)]
    assert torch.cuda.current_device() == 0


def test_choosing_the_backend_loads_them(loads: list[tuple[int, torch.dtype]]) -> None:
    """attach() chooses it for its start-up line; a loop without Megatron at its first call."""
    device = torch.device("cuda")
    assert choose_backend_name(device, BF16) == "cuda"
    assert select_backend("auto", device, BF16).name == "cuda"
    assert loads == [(0, BF16)]
    select_backend("cuda", torch.device("cuda", 0), BF16)
    assert loads == [(0, BF16)], "once for the device, whatever it is called"


def test_a_failed_load_is_tried_again(
    loads: list[tuple[int, torch.dtype]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(dtype: torch.dtype) -> int:
        raise cuda_library.CudaKernelError("magi_load_kernels failed with code 3: busy")

    device = torch.device("cuda", 0)
    with monkeypatch.context() as broken:
        broken.setattr(cuda_library, "cuda_library", lambda: SimpleNamespace(load_kernels=fail))
        with pytest.raises(cuda_library.CudaKernelError):
            cuda_library.load_kernels(device, BF16)
    cuda_library.load_kernels(device, BF16)
    assert loads == [(0, BF16)]


def test_every_kernel_of_the_sources_is_listed() -> None:
    """What a kernel list misses would be loaded in the middle of a step."""
    sources = [p for p in build.SOURCE_DIR.rglob("*") if p.suffix in (".cu", ".cuh", ".cpp", ".h")]
    text = "\n".join(re.sub(r"//.*", "", p.read_text()) for p in sources)
    kernels = set(re.findall(r"__global__[^;{]*?\bvoid\s+(\w+)\(", text, re.S))
    kernels |= set(re.findall(r"__global__[^;{]*?\)\s*void\s+(\w+)\(", text, re.S))
    listed = set(re.findall(r"kernel_of\((\w+)", text)) - {"void"}  # its definition
    assert kernels == listed and len(kernels) == 9
    tables = "".join(re.findall(r"kVariants\[\] = \{(.*?)\};", text, re.S))
    files = {path.stem for path in build.SOURCE_DIR.glob("instantiations/*.cu")}
    capped = {name for name in files if name.endswith("_softcap")}
    plain = {name for name in files - capped if name.startswith("bwd_")}
    assert capped == {f"{name}_softcap" for name in plain}, "a row of the table has both"
    names = {
        f"hd{wide}" + ("" if value == wide else f"_e{value}") for wide, value in COMPILED_WIDTHS
    }
    assert plain == {f"bwd_{dtype}_{name}" for dtype in ("bf16", "fp16") for name in names}
    assert tables.count("kFwd") == len(files - capped - plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)
def test_the_first_launch_of_a_kernel_does_not_wait() -> None:
    """In a process of its own: kernels of head_dim 64 are new, what PyTorch launches is not."""
    code = """
import torch
from megatron_magi import flex_flash_attn_func, masks
mask = masks.causal(256)
def step(dim):
    q, k, v = (torch.ones(256, h, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for h in (8, 2, 2))
    out, _ = flex_flash_attn_func(q, k, v, slices=mask, backend="cuda")
    return torch.autograd.grad(out, (q, k, v), out.detach())
step(128)
torch.cuda.synchronize()
torch.cuda._sleep(1_000_000_000)
busy = torch.cuda.Event()
busy.record()
step(64)
assert not busy.query(), "the host waited for the GPU"
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
