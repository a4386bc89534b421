"""Megatron's literal CUDA calls mean the CPU."""

from __future__ import annotations

from typing import Any


def test_cpu_runtime(run_jobs: Any) -> None:
    results = run_jobs([{"name": "cpu", "function": "cpu_runtime", "kwargs": {}, "world": 1}])
    assert results["cpu"]["values"] == [None]
