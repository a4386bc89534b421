"""The CUDA library and its device, on a stand-in that computes everything from the structs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron_magi.core.cuda.tables import DeviceBuffer
from tests.core.kernel import abi_on_cpu


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[abi_on_cpu.CpuLibrary]:
    made = abi_on_cpu.CpuLibrary()
    names = (f"megatron_magi.core.kernel.hopper.{name}" for name in ("forward", "backward"))
    modules = [importlib.import_module(name) for name in names]
    for module in modules:
        monkeypatch.setattr(module, "cuda_library", lambda: made)
        monkeypatch.setattr(module, "stream_handle", lambda device: 7)
        monkeypatch.setattr(module, "on_device", lambda device: nullcontext())
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    monkeypatch.setattr(DeviceBuffer, "use_on", lambda self, handle: False)
    yield made
    abi_on_cpu.BWD_MASKS.clear()
