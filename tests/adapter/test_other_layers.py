"""Layers of TransformerEngine (of a stand-in) and hybrid stacks train like Megatron's local ones.

The yardstick is stock: DotProductAttention or the stand-in's, dense masks, one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron_worker import run_jobs_of

STAND_INS = Path(__file__).parents[1] / "stand_ins"
JOBS = Path(__file__).parent / "adapter_jobs.py"
RELATIVE = {"loss": 1e-6, "grad_norm": 5e-6}
STOCK = {"attention": "stock"}
TWO = {"num_layers": 2}
ENGINE = {"layers": "te", **TWO}
HYBRID = {"layers": "hybrid", "experts": 4}
SP = {"tp": 2, "sp": True, "cp": 2}


def job(name: str, function: str = "train", **layout: Any) -> dict[str, Any]:
    world = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
    kwargs = {"name": name, **layout} if function == "train" else layout
    return {"name": name, "function": function, "kwargs": kwargs, "world": world}


def assert_equal(results: dict[str, Any], name: str, stock: str) -> None:
    """Every loss and gradient norm of every rank."""
    for each in (name, stock):
        assert "error" not in results[each], results[each]["error"]
    wanted = results[stock]["values"][0]
    for got in results[name]["values"]:
        for figure, relative in RELATIVE.items():
            assert got[figure] == pytest.approx(wanted[figure], rel=relative), figure


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = [
        job("stock", **STOCK, **TWO),
        job("stock causal", packed=False, **STOCK, **TWO),
        job("stock te causal", packed=False, **STOCK, **ENGINE),
        job("stock te kinds", "module_kinds", **STOCK, **ENGINE),
        job("te kinds", "module_kinds", **ENGINE),
        job("te", **ENGINE),
        job("te cp2", cp=2, **ENGINE),
        job("te tp2-sp-cp2", **SP, **ENGINE),
    ]
    return run_jobs_of(JOBS, jobs, tmp_path_factory.mktemp("te"), 280, (STAND_INS,))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = [
        job("stock", **STOCK, **HYBRID),
        job("hybrid", **HYBRID),
        job("hybrid cp2", cp=2, **HYBRID),
        job("hybrid pp2", pp=2, **HYBRID),
        job("hybrid tp2-sp-cp2", **SP, **HYBRID),
    ]
    return run_jobs_of(JOBS, jobs, tmp_path_factory.mktemp("hybrid"), 280)


def test_the_stand_in_is_a_yardstick(engine: dict[str, Any]) -> None:
    assert_equal(engine, "stock te causal", "stock causal")


@pytest.mark.parametrize("name", ["te", "te cp2", "te tp2-sp-cp2"])
def test_transformer_engine_layers(engine: dict[str, Any], name: str) -> None:
    assert_equal(engine, name, "stock")


def test_nothing_but_core_attention_is_swapped(engine: dict[str, Any]) -> None:
    (stock,), (ours,) = engine["stock te kinds"]["values"], engine["te kinds"]["values"]
    kept = {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "RMSNorm"}
    assert kept < set(stock) and "WrappedTorchNorm" not in ours
    assert set(stock) - set(ours) == {"TEDotProductAttention", "RotaryEmbedding"}
    assert set(ours) - set(stock) == {"MagiCoreAttention", "MagiRotaryEmbedding"}


@pytest.mark.parametrize("name", ["hybrid", "hybrid cp2", "hybrid pp2", "hybrid tp2-sp-cp2"])
def test_hybrid_model_without_transformer_engine(hybrid: dict[str, Any], name: str) -> None:
    assert_equal(hybrid, name, "stock")
