"""Bridge's own pretrain and finetune with `use_magi`: the same losses in any layout.

The yardstick is Bridge without it at context parallelism 1, with the dense attention of a stand-in
for TransformerEngine, whose layers Bridge's recipes take.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.megatron_worker import run_jobs_of

HERE = Path(__file__).parent
RELATIVE = {"loss": 1e-5, "grad_norm": 2e-5}
TIMEOUT_S = 280


def has_bridge() -> bool:
    try:
        return importlib.util.find_spec("megatron.bridge") is not None
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.bridge,
    pytest.mark.slow,
    pytest.mark.timeout(TIMEOUT_S + 10),
    pytest.mark.skipif(not has_bridge(), reason="megatron.bridge is not installed"),
]

CP2 = {"model.context_parallel_size": 2}
PP2 = {"model.pipeline_model_parallel_size": 2}
PP4 = {"model.pipeline_model_parallel_size": 4, "model.num_layers": 4}
TP2_SP = {"model.tensor_model_parallel_size": 2, "model.sequence_parallel": True}
SIZES = ("context_parallel_size", "pipeline_model_parallel_size", "tensor_model_parallel_size")
SHARDED = {
    "ddp.use_distributed_optimizer": True,
    "optimizer.use_distributed_optimizer": True,
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
}
TWO_SAMPLES = {"train.micro_batch_size": 2}
BY_EOD = {"dataset.reset_attention_mask": True, "dataset.reset_position_ids": True}
VALIDATE = {"validation.eval_iters": 1, "validation.eval_interval": 2}
PER_TOKEN = {"model.calculate_per_token_loss": True, "ddp.average_in_collective": False}
"""What `use_magi` sets; the yardstick must count in the same way."""
WRONG = {"model.attention_dropout": 0.1, "dist.use_decentralized_pg": True}


def job(
    name: str, *changes: dict[str, Any], magi: bool = True, dp_size: int = 1, **options: Any
) -> dict[str, Any]:
    """One run, on as many processes as its layout has ranks."""
    given = {field: value for each in changes for field, value in each.items()}
    world = dp_size
    for size in SIZES:
        world *= given.get(f"model.{size}", 1)
    given = given if magi else {**given, **PER_TOKEN}
    kwargs = {"changes": given, "magi": {"chunk_size": 8} if magi else None, **options}
    return {"name": name, "function": "run", "kwargs": kwargs, "world": world}


JOBS = [
    job("stock", VALIDATE, magi=False),
    job("cp2", CP2, VALIDATE),
    job("cp2 pp2", CP2, PP2),
    job("cp2 dp2", CP2, SHARDED, dp_size=2),
    job("cp2 tp2", CP2, TP2_SP),
    job("two samples cp2", CP2, TWO_SAMPLES),
    job("by eod cp1", BY_EOD),
    job("by eod cp2", BY_EOD, CP2),
    job("packed stock", magi=False, packed=True),
    job("packed cp1", packed=True),
    job("packed cp2", CP2, packed=True),
    job("packed moved", CP2, packed=True, moved=True),
    job("packed deep", {"model.num_layers": 4}, magi=False, packed=True),
    job("packed pp4", PP4, packed=True),
    job("lora stock", magi=False, packed=True, lora=True),
    job("lora cp2", CP2, packed=True, lora=True),
    job("refused", CP2, WRONG),
    {"name": "example cp2", "function": "example", "kwargs": {"cp_size": 2}, "world": 2},
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first = (HERE.parent / "stand_ins",)
    folder = tmp_path_factory.mktemp("bridge")
    return run_jobs_of(HERE / "bridge_jobs.py", JOBS, folder, TIMEOUT_S, first)


@pytest.mark.parametrize(
    ("name", "yardstick"),
    [
        ("cp2", "stock"),
        ("cp2 pp2", "stock"),
        ("cp2 dp2", "stock"),
        ("cp2 tp2", "stock"),
        ("two samples cp2", "stock"),
        ("example cp2", "stock"),
        ("by eod cp2", "by eod cp1"),
        ("packed cp1", "packed stock"),
        ("packed cp2", "packed stock"),
        ("packed pp4", "packed deep"),
        ("lora cp2", "lora stock"),
    ],
)
def test_the_losses_are_those_of_one_rank(results: Any, name: str, yardstick: str) -> None:
    ours, theirs = results[name]["values"][-1], results[yardstick]["values"][-1]
    for figure, relative in RELATIVE.items():
        assert len(ours[figure]) == 4
        assert ours[figure] == pytest.approx(theirs[figure], rel=relative)


def test_documents_change_the_loss(results: Any) -> None:
    with_documents, without = (results[name]["values"][-1] for name in ("by eod cp2", "cp2"))
    assert with_documents["loss"][1] != pytest.approx(without["loss"][1], rel=1e-3)


def test_a_boundary_moved_by_one_token_is_noticed(results: Any) -> None:
    moved, right = (results[name]["values"][-1] for name in ("packed moved", "packed stock"))
    assert moved["loss"][0] != pytest.approx(right["loss"][0], rel=1e-3)


def test_validation_has_the_same_loss(results: Any) -> None:
    ours, theirs = (validation_losses(results[name]["values"][-1]) for name in ("cp2", "stock"))
    assert len(ours) == 4
    assert ours == pytest.approx(theirs, rel=RELATIVE["loss"])


def validation_losses(value: dict[str, Any]) -> list[float]:
    lines = [line for line in value["output"].splitlines() if "validation loss" in line]
    return [float(line.split("lm loss value: ")[1].split()[0]) for line in lines]


def test_keys_travel_and_plans_are_counted(results: Any) -> None:
    figures = [value["log"]["magi key rows received"] for value in results["packed cp2"]["values"]]
    assert all(max(of_rank) > 0 for of_rank in figures)


def test_packed_microbatches_are_planned_from_the_host_and_logged(results: Any) -> None:
    output = results["packed cp2"]["values"][0]["output"]
    assert "documents by cu_seqlens" in output
    assert "model.calculate_per_token_loss is set" in output
    assert "ddp.average_in_collective is not used" in output


def test_what_does_not_work_is_refused_at_once(results: Any) -> None:
    for value in results["refused"]["values"]:
        dropout, groups = value["refused"].splitlines()
        assert "use_magi requires attention_dropout=0.0, got 0.1" in dropout
        assert "dist.use_decentralized_pg=True" in groups
