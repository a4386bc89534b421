"""What the loop reports of a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.step_records import config


@pytest.mark.parametrize(("device", "share"), [("NVIDIA H200", 0.5), ("NVIDIA H20", None)])
def test_mfu_is_the_share_of_the_gpus_rate(
    monkeypatch: pytest.MonkeyPatch, device: str, share: float | None
) -> None:
    """Two ranks that do half of a GPU's work each in the time of a step."""
    pytest.importorskip("megatron.core")
    from megatron_magi.training.run import loop

    per_rank = 0.5 * 989.4e12
    ticks = iter([10.0])
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(loop.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loop, "_memory_bytes", lambda: 0)
    monkeypatch.setattr(loop, "step_flops", lambda *_: 2 * 4 * per_rank)
    monkeypatch.setattr(loop.torch.cuda, "get_device_name", lambda: device)
    monkeypatch.setattr(loop.torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(loop.dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(loop.dist, "get_world_size", lambda: 2)
    state: Any = SimpleNamespace(iteration=0, consumed_samples=0)
    stop: Any = SimpleNamespace(signal_number=0)
    sums = loop.BatchSums(2.0, 1.0, 1.0, 1.0, 1.0)
    made, _ = loop._finish_step(config(Path("x")), state, (sums, 1.0, 1e-3), 6.0, stop)
    assert made.mfu == pytest.approx(share)
    assert made.tflops_per_rank == pytest.approx(per_rank / 1e12)
