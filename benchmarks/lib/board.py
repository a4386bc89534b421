"""The clock and the power of the GPU while a cell is timed, from NVIDIA's management library."""

from __future__ import annotations

import ctypes
import functools

import torch

GRAPHICS_CLOCK = 0


@functools.cache
def _device() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """(library, handle of PyTorch's current GPU); None where the library is not there."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    bus = torch.cuda.get_device_properties(torch.cuda.current_device())
    place = f"{bus.pci_domain_id:08x}:{bus.pci_bus_id:02x}:{bus.pci_device_id:02x}.0"
    found = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByPciBusId_v2(
        place.encode(), ctypes.byref(handle)
    )
    return None if found else (library, handle)


def board_state() -> dict[str, int]:
    """{"mhz": clock of the SMs, "watt": power of the last second}; empty where it is not known.

    Call it while the GPU works, or at once after that: an idle GPU lowers both.
    """
    found = _device()
    if found is None:
        return {}
    library, handle = found
    clock, power = ctypes.c_uint(), ctypes.c_uint()
    library.nvmlDeviceGetClockInfo(handle, GRAPHICS_CLOCK, ctypes.byref(clock))
    library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power))
    return {"mhz": clock.value, "watt": power.value // 1000}
