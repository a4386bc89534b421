"""Softmax sinks train like stock Megatron on one process, QK-clip like ours on one process.

Losses, gradient norms and largest logits of two optimizer steps, fp32. Stock runs
DotProductAttention, which has sinks but keeps no logits; those of one process are compared with a
dense computation in test_softmax_sink.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapter.layout_cases import (
    ADAM_EPS,
    RELATIVE,
    Case,
    differences,
    run_asked_cases,
    values,
)

LEARNABLE, OFF_BY_ONE = "learnable", "off-by-one"
WINDOWS = {"packed": False, "window": [11, 0], "window_skip": 2}
CLIP = 0.35
"""Some heads' largest logits lie above it, so weights are clipped after every step."""


def sink(id: str, softmax_type: str = LEARNABLE, **layout: Any) -> Case:
    return Case(id, {"softmax_type": softmax_type, "adam_eps": ADAM_EPS, **layout})


def clip(id: str, **layout: Any) -> Case:
    return Case(id, {"qk_clip": CLIP, "adam_eps": ADAM_EPS, **layout}, "magi")


SINKS = [
    sink("learnable-one-process"),
    sink("learnable-tp2-sp", tp=2, sp=True),
    sink("learnable-cp2", cp=2),
    sink("learnable-cp3-odd-length", cp=3, seq_length=89),
    sink("learnable-cp4-padded", cp=4, seq_length=90),
    sink("learnable-cp2-pp2", cp=2, pp=2),
    sink("learnable-dp2-cp2", dp=2, cp=2, distributed_optimizer=True),
    sink("learnable-cp2-recompute-full", cp=2, recompute="full"),
    sink("learnable-cp2-recompute-core-attn", cp=2, recompute="core_attn"),
    sink("learnable-windows-cp2", cp=2, **WINDOWS),
    sink("learnable-windows-tp2-cp2-pp2", tp=2, sp=True, cp=2, pp=2, **WINDOWS),
    sink("learnable-mtp-cp2", cp=2, mtp=2),
    sink("off-by-one-cp2", OFF_BY_ONE, cp=2),
    sink("off-by-one-windows-cp3", OFF_BY_ONE, cp=3, **WINDOWS),
]
CLIPS = [
    clip("clip-cp2", cp=2),
    clip("clip-cp3-odd-length", cp=3, seq_length=89),
    clip("clip-dp2-cp2", dp=2, cp=2),
    clip("clip-cp2-pp2", cp=2, pp=2),
    clip("clip-cp2-recompute-full", cp=2, recompute="full"),
    clip("clip-cp2-recompute-core-attn", cp=2, recompute="core_attn"),
    clip("clip-windows-sinks-cp2", cp=2, softmax_type=LEARNABLE, **WINDOWS),
]
LOGS = [
    Case(f"log-{id}", {"log_max_logit": True, "adam_eps": ADAM_EPS, **layout}, "magi")
    for id, layout in (
        ("cp2", {"cp": 2}),
        ("tp2-sp-cp2-pp2-windows", {"tp": 2, "sp": True, "cp": 2, "pp": 2, **WINDOWS}),
    )
]
CLIPPED_TP = clip("clip-tp2", tp=2)
VANILLA = sink("vanilla", "vanilla")
UNCLIPPED = clip("unclipped", qk_clip=1e6)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, run_jobs: Any) -> Any:
    return run_asked_cases(request, run_jobs)


@pytest.mark.parametrize("wanted", SINKS, ids=lambda c: c.id)
def test_sinks_train_like_stock_cp1(results: dict[str, Any], wanted: Case) -> None:
    found = differences(values(results, wanted), values(results, wanted.baseline()))
    assert max(found.values()) < RELATIVE, found


@pytest.mark.parametrize("wanted", LOGS, ids=lambda c: c.id)
def test_logged_logits_are_those_of_one_process(results: dict[str, Any], wanted: Case) -> None:
    found = differences(values(results, wanted), values(results, wanted.baseline()))
    assert "max_logit" in found
    assert max(found.values()) < RELATIVE, found


@pytest.mark.parametrize("wanted", [CLIPPED_TP], ids=lambda c: c.id)
def test_clipping_that_megatron_cannot_do(results: dict[str, Any], wanted: Case) -> None:
    error = results[wanted.id]["error"]
    assert error.count("qk_clip requires tensor_model_parallel_size=1, got 2") == 2


@pytest.mark.parametrize("wanted", CLIPS, ids=lambda c: c.id)
def test_clipping_is_the_same_on_one_process(results: dict[str, Any], wanted: Case) -> None:
    one = values(results, wanted.baseline())
    assert min(one["max_logit"]) > CLIP
    found = differences(values(results, wanted), one)
    assert max(found.values()) < RELATIVE, found


@pytest.mark.parametrize(("wanted", "other"), [(VANILLA, SINKS[0]), (UNCLIPPED, CLIPS[0])])
def test_the_settings_change_the_run(results: dict[str, Any], wanted: Case, other: Case) -> None:
    found = differences(values(results, wanted), values(results, other))
    assert max(found["loss"], found["grad_norm"]) > 20 * RELATIVE, found


SHARDS = [
    {"name": f"{attention} {tp}", "function": "sink_shards", "kwargs": {"attention": attention}}
    | {"world": tp}
    for tp in (1, 2)
    for attention in ("stock", "magi")
]


@pytest.fixture(scope="module")
def shards(run_jobs: Any) -> Any:
    return run_jobs(SHARDS)


@pytest.mark.parametrize("tp", [1, 2])
def test_checkpoints_hold_the_sinks_like_stock(shards: dict[str, Any], tp: int) -> None:
    stock, ours = (shards[f"{attention} {tp}"] for attention in ("stock", "magi"))
    assert len(stock["values"][0]) == 4
    assert ours["values"] == stock["values"]
    for rank, found in enumerate(ours["values"]):
        # Layers and heads; a rank's offset is its first head.
        assert found[2]["global_shape"] == [4, 4]
        assert found[2]["global_offset"] == [2, rank * 4 // tp]
        assert found[2]["local_shape"] == [4 // tp]
