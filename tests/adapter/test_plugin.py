"""Activation in a real model: active and said once, or stopped with one line."""

from __future__ import annotations

from typing import Any

import pytest

JOBS: dict[str, dict[str, Any]] = {
    "ours": {},
    "stock": {"spec": "stock", "changes": {"context_parallel_size": 1}},
    "mtp-stage": {"changes": {"mtp_num_layers": 1, "mtp_standalone": True}},
    "dropout": {"changes": {"attention_dropout": 0.1}},
}


LATENT: dict[str, dict[str, Any]] = {
    "latent": {},
    "latent fused": {"changes": {"apply_rope_fusion": True}},
}


@pytest.fixture(scope="module")
def results(run_jobs: Any) -> Any:
    jobs = [
        {"name": name, "function": "attach", "kwargs": kwargs, "world": 2}
        for name, kwargs in JOBS.items()
    ]
    jobs += [
        {"name": name, "function": "attach_latent", "kwargs": kwargs, "world": 2}
        for name, kwargs in LATENT.items()
    ]
    jobs += [
        {
            "name": f"checkpoint {attention}",
            "function": "checkpoint_names",
            "kwargs": {"tp": world, "attention": attention},
            "world": world,
        }
        for world, attention in ((1, "stock"), (2, "magi"))
    ]
    return run_jobs(jobs)


def test_startup_line_is_equal_on_ranks_and_printed_by_one(results: dict[str, Any]) -> None:
    first, second = results["ours"]["values"]
    assert first == second
    assert first.startswith(
        "megatron_magi active: kernel reference, transport all_to_all over gloo, cp 2, "
        "heads 4/2x16, "
    )
    assert "(causal, 64 tokens)" in first
    # attach ran twice on each of two ranks.
    assert results["output"].count(first) == 2


def test_startup_line_of_multi_latent_attention(results: dict[str, Any]) -> None:
    first, second = results["latent"]["values"]
    assert first == second and "kernel reference, " in first and "heads 4/4x24+12, " in first
    assert results["latent fused"]["values"] == [first, second]


def test_stock_attention_is_not_active(results: dict[str, Any]) -> None:
    error = results["stock"]["error"]
    assert error.count("RuntimeError: megatron_magi is not active: every self-attention must") == 2
    assert "got 4 other: decoder.layers.0.self_attention (DotProductAttention)" in error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mtp-stage", "requires its layers on the last pipeline stage here, got a pipeline_model"),
        ("dropout", "requires attention_dropout=0.0, got 0.1"),
    ],
)
def test_what_does_not_work_stops_before_training(
    results: dict[str, Any], name: str, message: str
) -> None:
    for error in results[name]["error"].split("\nrank 1: "):
        assert "NotImplementedError" in error
        assert message in error


def test_checkpoints_hold_what_stock_ones_hold(results: dict[str, Any]) -> None:
    (stock,) = results["checkpoint stock"]["values"]
    assert len(stock) > 10
    for ours in results["checkpoint magi"]["values"]:
        assert ours == stock
