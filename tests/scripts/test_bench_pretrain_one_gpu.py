"""Ranks that share a GPU: what is changed for them, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_magi.cli.parser import UsageError
from megatron_magi.core.comm import transport_choice

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_pretrain
import bench_pretrain_one_gpu


def test_every_rank_takes_the_first_gpu_and_gloo_gets_no_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **more: given.update(more))
    monkeypatch.setattr(dist, "_coalescing_manager", None)
    monkeypatch.setattr(transport_choice, "_why_not", None)
    for name in ("LOCAL_RANK", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"):
        monkeypatch.setenv(name, "1")
    bench_pretrain_one_gpu.share_a_gpu()
    dist.init_process_group(backend="gloo", device_id="cuda:1")  # type: ignore[arg-type]
    assert given == {"backend": "gloo"}
    assert bench_pretrain_one_gpu.os.environ["LOCAL_RANK"] == "0"
    with dist._coalescing_manager(None) as ended:
        pass
    ended.wait()
    assert transport_choice._why_not(None, None) == ""  # type: ignore[arg-type]


def test_times_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["bench_pretrain.py", "speed", "--one-gpu", "--megatron", "x", "--record", "y"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(UsageError, match="times of ranks that share a GPU"):
        bench_pretrain.parse()
