"""Clock and power of a GPU, of a library that stands in for NVIDIA's."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.lib import board


class Library:
    """Of one GPU, at 0000001b:b8:00.0."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, place: bytes, handle: Any) -> int:
        return 0 if place == b"0000001b:b8:00.0" else 6

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, mhz: Any) -> None:
        mhz._obj.value = 1755

    def nvmlDeviceGetPowerUsage(self, handle: Any, milliwatt: Any) -> None:
        milliwatt._obj.value = 698_400


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = SimpleNamespace(pci_domain_id=0x1B, pci_bus_id=0xB8, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: bus)
    board._device.cache_clear()


def test_a_cell_has_the_clock_and_the_power(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert board.board_state() == {"mhz": 1755, "watt": 698}


def test_a_machine_without_the_library_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert board.board_state() == {}
