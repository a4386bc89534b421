"""Layers that differ in their masks and positions, through the flag: Llama 4's chunks, no RoPE."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import megatron_magi.adapter
from tests.launcher.layouts import CP2, JOBS, MAGI, SMALL_SCRIPT, assert_same_training, job, values
from tests.megatron_worker import run_jobs_of

pytestmark = pytest.mark.skipif(
    megatron_magi.adapter.MEGATRON_VERSION[:2] != (0, 19),
    reason="the script is written for megatron.training of the 0.19 wheel",
)

TWO_STEPS = {"train-iters": 2}
NO_ROPE = {"no-rope-freq": 2}
ALL_CHUNKS = {"magi-mask": "chunk_masks:chunks"}
SECOND_GLOBAL = {"window-size": "23,0", "window-attn-skip-freq": 2}
CHUNKS = {**SECOND_GLOBAL, "magi-mask": "chunk_masks:chunks_in_window_layers"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = [
        job(name, SMALL_SCRIPT, TWO_STEPS, *flags)
        for name, flags in {
            "stock": (),
            "stock no rope": (NO_ROPE,),
            "cp2 no rope": (CP2, NO_ROPE),
            "stock chunks": ({"dense-mask": "chunk_masks:chunks"},),
            "cp2 chunks in a window": (CP2, ALL_CHUNKS, {"window-size": "23,0"}),
            "cp1 llama 4": (MAGI, NO_ROPE, CHUNKS),
            "cp2 llama 4": (CP2, NO_ROPE, CHUNKS),
        }.items()
    ]
    return run_jobs_of(JOBS, jobs, tmp_path_factory.mktemp("kinds"), 290)


@pytest.mark.parametrize(
    ("name", "yardstick"),
    [
        ("cp2 no rope", "stock no rope"),
        ("cp2 chunks in a window", "stock chunks"),
        ("cp2 llama 4", "cp1 llama 4"),
    ],
)
def test_two_ranks_train_what_one_trains(
    results: dict[str, Any], name: str, yardstick: str
) -> None:
    assert_same_training(results[name], results[yardstick])


def test_every_setting_matters(results: dict[str, Any]) -> None:
    names = ("stock", "stock no rope", "stock chunks", "cp1 llama 4")
    first = sorted(values(results[name])["loss"][0] for name in names)
    assert min(b - a for a, b in pairwise(first)) > 1e-5
