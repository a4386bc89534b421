"""Which kernel computes a call: what "auto" means, what a name asks for, what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron_magi.core.kernel import flash4, hopper
from megatron_magi.core.kernel.head_dims import HeadDims
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.select import (
    BACKENDS,
    choose_backend_name,
    is_hopper,
    select_backend,
)
from megatron_magi.core.kernel.torch_flex import FlexBackend

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TOO_WIDE = HeadDims(320, 320)


@pytest.fixture(autouse=True)
def nothing_was_chosen_before() -> Iterator[None]:
    select_backend.cache_clear()
    yield
    select_backend.cache_clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.device, torch.dtype]]:
    """What the Hopper backend is made for, on a machine that pretends to have the GPU."""
    seen: list[tuple[torch.device, torch.dtype]] = []

    def make(*given: torch.device | torch.dtype) -> SimpleNamespace:
        seen.append(given)  # type: ignore[arg-type]
        return SimpleNamespace(name="cuda")

    monkeypatch.setattr(hopper, "HopperBackend", make)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return seen


@pytest.mark.parametrize(
    "capability, hopper_gpu", [((9, 0), True), ((8, 9), False), ((10, 0), False)]
)
def test_hopper_is_its_capability(
    capability: tuple[int, int], hopper_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On machines with several kinds of GPUs, that of the device that is asked about."""
    of = {GPU: capability, torch.device("cuda", 1): (7, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", of.__getitem__)
    assert is_hopper(GPU) is hopper_gpu
    assert not is_hopper(torch.device("cuda", 1)) and not is_hopper(CPU)


@pytest.mark.parametrize(
    "device, dtype, widths, hopper_gpu, name",
    [
        (GPU, BF16, (64, 64), True, "cuda"),
        (GPU, FP16, (192, 128), True, "cuda"),
        (GPU, BF16, (80, 48), True, "cuda"),
        (GPU, BF16, (192, 192), True, "cuda"),
        (GPU, FP16, (256, 64), True, "cuda"),
        (GPU, BF16, (264, 64), True, "flex"),
        (GPU, FP16, (64, 264), True, "flex"),
        (GPU, BF16, (64, 64), False, "flex"),
        (GPU, FP16, (192, 192), False, "flex"),
        (GPU, FP32, (64, 64), True, "reference"),
        (GPU, FP64, (192, 192), False, "reference"),
        (CPU, BF16, (64, 64), True, "reference"),
        (torch.device("meta"), BF16, (64, 64), True, "reference"),
    ],
)
def test_auto(
    device: torch.device,
    dtype: torch.dtype,
    widths: tuple[int, int],
    hopper_gpu: bool,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capability = (9, 0) if hopper_gpu else (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_backend_name(device, dtype, HeadDims(*widths)) == name


def test_a_name_is_that_backend_on_a_gpu(made: list[tuple[torch.device, torch.dtype]]) -> None:
    assert isinstance(select_backend("reference", GPU, BF16), ReferenceBackend)
    assert isinstance(select_backend("flex", GPU, FP32), FlexBackend)
    assert made == []
    assert select_backend("cuda", GPU, FP16).name == "cuda"
    assert made == [(GPU, FP16)]
    assert {"auto", "reference", "flex", "cuda", "fa4"} == set(BACKENDS)


def test_auto_makes_what_it_chose(made: list[tuple[torch.device, torch.dtype]]) -> None:
    assert choose_backend_name(GPU, BF16) == "cuda", "unless the heads are said to be too wide"
    assert select_backend("auto", GPU, BF16).name == "cuda" and made == [(GPU, BF16)]
    assert select_backend("auto", GPU, BF16, TOO_WIDE).name == "flex"
    assert select_backend("auto", GPU, FP32).name == "reference"
    assert select_backend("auto", CPU, BF16).name == "reference" and len(made) == 1


def test_each_choice_is_made_and_logged_once(
    made: list[tuple[torch.device, torch.dtype]], caplog: pytest.LogCaptureFixture
) -> None:
    """A layer asks at every call."""
    with caplog.at_level(logging.INFO, "megatron_magi"):
        first = select_backend("auto", GPU, BF16)
        assert select_backend("auto", GPU, BF16) is first
        assert select_backend("auto", GPU, FP16) is not first
    assert made == [(GPU, BF16), (GPU, FP16)]
    assert [record.getMessage() for record in caplog.records] == [
        f"attention kernel: cuda (asked for auto) on cuda:0, {dtype}" for dtype in (BF16, FP16)
    ]


@pytest.mark.parametrize(
    "capability, installed, widths, name",
    [
        ((10, 0), True, (64, 128), "fa4"),
        ((10, 3), True, (128, 128), "fa4"),
        ((10, 0), True, (192, 128), "flex"),
        ((10, 0), True, (20, 20), "flex"),
        ((10, 0), False, (64, 64), "flex"),
        ((12, 0), True, (64, 64), "flex"),
        ((9, 0), True, (64, 64), "cuda"),
    ],
)
def test_flash_attention_4_is_chosen_on_blackwell_where_it_is_installed(
    capability: tuple[int, int],
    installed: bool,
    widths: tuple[int, int],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(flash4, "is_installed", lambda: installed)
    assert choose_backend_name(GPU, BF16, HeadDims(*widths)) == name
    assert choose_backend_name(GPU, FP32, HeadDims(*widths)) == "reference"


def test_flash_attention_4_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not flash4.is_installed()
    with pytest.raises(NotImplementedError, match="needs the package flash-attn-4, got none"):
        select_backend("fa4", GPU, BF16)
    monkeypatch.setattr(flash4, "is_installed", lambda: True)
    assert isinstance(select_backend("fa4", GPU, BF16), flash4.Flash4Backend)
    for dtype, widths in ((BF16, HeadDims(192, 128)), (FP32, HeadDims(64, 64))):
        with pytest.raises(NotImplementedError, match="takes bf16 and fp16, and heads of multipl"):
            select_backend("fa4", GPU, dtype, widths)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(NotImplementedError, match=r"Hopper or Blackwell GPU, got .* 8\.x; use 'f"):
        select_backend("fa4", GPU, FP16)


@pytest.mark.parametrize("name", ["flex", "cuda", "fa4"])
def test_kernels_of_a_gpu_are_refused_elsewhere(name: str) -> None:
    text = rf"kernel backend '{name}' needs CUDA tensors, got cpu; use 'auto' or 'reference' on"
    with pytest.raises(NotImplementedError, match=text):
        select_backend(name, CPU, BF16)


def test_heads_that_are_too_wide_are_refused_by_cuda_alone(
    made: list[tuple[torch.device, torch.dtype]],
) -> None:
    text = r"up to 256 and values up to 256, got 320 and 320; use the backend 'flex'"
    with pytest.raises(NotImplementedError, match=text):
        select_backend("cuda", GPU, BF16, TOO_WIDE)
    assert made == []
    assert select_backend("flex", GPU, BF16, TOO_WIDE).name == "flex"
    assert select_backend("reference", CPU, BF16, TOO_WIDE).name == "reference"
