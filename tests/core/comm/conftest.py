"""The kernels that move and add rows, computed from their structs alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from megatron_magi.core.comm import rows as row_moves
from tests.core.kernel import abi_on_cpu


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[abi_on_cpu.CpuLibrary]:
    made = abi_on_cpu.CpuLibrary()
    monkeypatch.setattr(row_moves, "loaded_cuda_library", lambda device: made)
    monkeypatch.setattr(row_moves, "stream_handle", lambda device: 7)
    monkeypatch.setattr(row_moves, "on_device", lambda device: nullcontext())
    yield made
