"""Work on a side stream runs after what came before, and is waited for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_magi.core.cuda import side_stream as module
from megatron_magi.core.cuda.side_stream import SideStream, side_stream


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_order_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    side = side_stream(device)
    assert side_stream(device) is side
    x = torch.zeros(1 << 20, device=device)
    before = torch.cuda.current_stream(device)
    for turn in range(20):
        torch.cuda._sleep(1_000_000)
        x.fill_(turn)
        with side.current():
            assert torch.cuda.current_stream(device) == side.stream
            torch.cuda._sleep(1_000_000)
            x.mul_(2)
        assert torch.cuda.current_stream(device) == before
        side.join()
        assert float(x.max()) == float(x.min()) == 2 * turn


def test_the_streams_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which handles are ordered by which event, without a GPU; also if the block fails."""
    calls: list[tuple[str, object]] = []
    main = SimpleNamespace(cuda_stream=1)
    event = SimpleNamespace(cuda_event=7, record=lambda stream: None)
    library = SimpleNamespace(follow=lambda *handles: calls.append(("follow", handles)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *a, **k: SimpleNamespace(cuda_stream=2))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda s: calls.append(("set", s.cuda_stream)))
    monkeypatch.setattr(module, "cuda_library", lambda: library)
    monkeypatch.setattr(module, "stream_handle", lambda device: 1)
    side = SideStream(torch.device("cuda", 0))
    with pytest.raises(ZeroDivisionError), side.current():
        calls.append(("work", 0))
        _ = 1 / 0
    side.join()
    assert calls == [
        ("follow", (2, 1, 7)), ("set", 2), ("work", 0), ("set", 1), ("follow", (1, 2, 7)),
    ]  # fmt: skip
    calls.clear()
    main.cuda_stream = 5  # the memory of the side stream may still be read by the first one
    with side.current():
        pass
    assert calls == [("follow", (2, 5, 7)), ("follow", (2, 1, 7)), ("set", 2), ("set", 5)]
