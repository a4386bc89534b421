"""Tables on the device: the host does not wait, and every stream sees them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megatron_magi.core.cuda.tables import ALIGNMENT, DeviceBuffer, upload, upload_together

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=gpu)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_the_copy_is_the_table(device: torch.device, size: int) -> None:
    with torch.inference_mode():
        host = torch.arange(size, dtype=torch.int32)
        buffer = DeviceBuffer.upload(host, device)
    assert not buffer.data.is_inference() and buffer.here() is buffer.data
    assert buffer.data.device == device and torch.equal(buffer.here().cpu(), host)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_does_not_wait_and_other_streams_do() -> None:
    device = torch.device("cuda", 0)
    DeviceBuffer.upload(torch.zeros(1 << 20), device)  # the pinned memory is there
    busy, host = torch.cuda.Event(), torch.arange(1 << 20)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):  # first uses wait for the GPU: of a kernel, a stream, its memory
        _ = host.to(device) + 1
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    busy.record()
    buffer = DeviceBuffer.upload(host, device)
    with torch.cuda.stream(other):
        seen = buffer.here() + 1
    assert not busy.query(), "the host waited for the stream"
    torch.cuda.synchronize()
    assert torch.equal(seen.cpu(), host + 1) and len(buffer.streams) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tables_of_one_upload_are_seen_from_another_thread_and_stream() -> None:
    """As a data loader makes them: the host does not wait, and a later launch does."""
    device = torch.device("cuda", 0)
    arrays = [np.arange(n, dtype=kind) for n in (0, 7, 1 << 20) for kind in (np.int32, np.int64)]
    upload_together(arrays, device)  # the pinned memory is there
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        _ = torch.ones(1 << 20, device=device) + 1
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    busy.record()
    with ThreadPoolExecutor(1) as pool:
        tables = pool.submit(upload_together, arrays, device).result()
    assert not busy.query(), "the host waited for the stream"
    with torch.cuda.stream(other):
        seen = [table.here() + 1 for table in tables]
    torch.cuda.synchronize()
    for table, array, later in zip(tables, arrays, seen, strict=True):
        assert np.array_equal(later.cpu().numpy(), array + 1)
        assert table.data.device == device and table.address % ALIGNMENT == 0
    assert len({id(table.buffer) for table in tables}) == 1


def test_only_what_goes_to_a_gpu_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", None)
    x = torch.arange(3)
    assert torch.equal(upload(x, "cpu"), x)
