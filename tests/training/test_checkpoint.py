"""A run that was cut goes on as if it had not been: same bits, or another layout's same losses."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_magi.training.checkpoint.checkpoint_facts import read_facts
from megatron_magi.training.data.corpus import packed_sha256

pytestmark = pytest.mark.slow

RELATIVE = 2e-5
CUT_AT = 3

LAYOUTS: dict[str, dict[str, Any]] = {
    "cp1": {},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2_cp2": {"pp": 2, "cp": 2},
    "dp2": {"dp": 2},
}
SHARDED: dict[str, dict[str, Any]] = {
    "cp2_again": {"cp": 2},
    "dp2_cp2_sharded": {
        "dp": 2,
        "cp": 2,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "tp2_sharded": {"tp": 2},
}
"""Resumed with the optimizer's state sharded over data and context parallel ranks."""


CHANGED: dict[str, dict[str, Any]] = {
    "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "warmup_iters": 2, "weight_decay": 0.3},
    "train": {"iterations": 5, "global_batch_size": 2},
}
"""Settings that a resumed run may change."""


@pytest.fixture(scope="module")
def results(
    folder: Path,
    tiny_recipe: Callable[..., dict[str, Any]],
    run_training_jobs: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    validation = {"fraction": 0.2, "interval": 2, "batches": 2}

    def job(name: str, world: int = 2, run: str = "", stop: bool = False, **sections: Any) -> Any:
        sections = {"parallel": {"cp": 2}, "validation": validation, **sections}
        recipe = tiny_recipe(run or name, folder, **sections)
        kwargs = {"recipe": recipe, "signal_at": CUT_AT if stop else None}
        return {"name": name, "function": "train", "kwargs": kwargs, "world": world}

    def layout(name: str, options: dict[str, Any], load: str, **sections: Any) -> Any:
        options = {**options, **sections.pop("parallel", {})}
        world = options.get("tp", 1) * options.get("pp", 1) * options.get("cp", 1)
        path = {"load": str(folder / load / "checkpoints"), "interval": 100}
        world *= options.get("dp", 1)
        return job(name, world, parallel=options, checkpoint=path, **sections)

    sharded = {"cp": 2, "distributed_optimizer": True}
    bf16 = {"train": {"iterations": 6, "global_batch_size": 2, "dtype": "bf16"}}
    return run_training_jobs(
        [
            job("whole", checkpoint={"interval": 2, "keep": 2}),
            job("cut", stop=True),
            *(layout(name, options, "cut") for name, options in LAYOUTS.items()),
            job("whole_sharded", parallel=sharded),
            job("half_sharded", parallel=sharded, stop=True),
            *(
                layout(n, {**o, "distributed_optimizer": True}, "half_sharded")
                for n, o in SHARDED.items()
            ),
            job("whole_bf16", parallel=sharded, **bf16),
            job("half_bf16", parallel=sharded, stop=True, **bf16),
            layout("again_bf16", sharded, "half_bf16", **bf16),
            *(
                job(name, parallel={**parallel}, checkpoint=load, **CHANGED)
                for name, parallel, load in (
                    ("fresh", {"cp": 2}, {}),
                    ("changed", {"cp": 2}, {"load": str(folder / "cut" / "checkpoints")}),
                    (
                        "changed_sharded",
                        sharded,
                        {"load": str(folder / "half_sharded/checkpoints")},
                    ),
                )
            ),
            job("done", run="cut", train={"iterations": CUT_AT}, checkpoint={"load": "latest"}),
            job(
                "other",
                checkpoint={"load": str(folder / "cut" / "checkpoints")},
                model={"num_layers": 4},
            ),
            # The last one: it saves in the folder that the others are resumed from.
            job("resumed", run="cut", checkpoint={"load": "latest", "interval": 100}),
        ]
    )


def values(results: dict[str, Any], name: str) -> Any:
    result = results[name]
    assert "error" not in result, result["error"]
    assert all(answer == result["values"][0] for answer in result["values"])
    return result["values"][0]


def columns(path: Path) -> list[dict[str, str]]:
    """Lines of a steps.csv without what measures the machine."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    measured = ("step_seconds", "tokens_per_second", "tflops_per_rank", "memory_gib")
    return [{k: v for k, v in row.items() if k not in measured} for row in rows]


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_after_that_step(
    results: dict[str, Any], folder: Path
) -> None:
    assert [r[0] for r in values(results, "cut")] == [1, 2, 3]
    assert (
        f"stopped by SIGTERM after iteration {CUT_AT} of 6, nothing is lost; "
        "to go on: the same command with checkpoint.load=latest" in results["output"]
    )


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    results: dict[str, Any], folder: Path
) -> None:
    whole = values(results, "whole")
    assert values(results, "cut") == whole[:CUT_AT]
    assert values(results, "resumed") == whole[CUT_AT:]
    rows = columns(folder / "whole" / "steps.csv")
    assert columns(folder / "cut" / "steps.csv") == rows
    assert [r["iteration"] for r in rows] == list("123456")
    assert [bool(r["validation_loss"]) for r in rows] == [False, True] * 3


@pytest.mark.parametrize(("kind", "again"), [("sharded", "cp2_again"), ("bf16", "again_bf16")])
def test_a_sharded_optimizer_resumes_bit_for_bit(
    results: dict[str, Any], kind: str, again: str
) -> None:
    whole = values(results, f"whole_{kind}")
    assert values(results, f"half_{kind}") == whole[:CUT_AT]
    assert values(results, again) == whole[CUT_AT:]


def relative(results: dict[str, Any], name: str, whole: str) -> float:
    pairs = zip(values(results, name), values(results, whole)[CUT_AT:], strict=True)
    return max(abs(float.fromhex(a[i]) / float.fromhex(b[i]) - 1) for a, b in pairs for i in (1, 2))


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_layout_goes_on_with_the_same_losses(results: dict[str, Any], name: str) -> None:
    assert relative(results, name, "whole") < RELATIVE


@pytest.mark.parametrize("name", [n for n in SHARDED if n != "cp2_again"])
def test_a_sharded_optimizer_goes_on_in_another_layout(results: dict[str, Any], name: str) -> None:
    assert relative(results, name, "whole_sharded") < RELATIVE


def test_only_the_newest_checkpoints_stay_and_nothing_is_half_written(
    results: dict[str, Any], folder: Path
) -> None:
    values(results, "whole")
    names = sorted(p.name for p in (folder / "whole" / "checkpoints").iterdir())
    assert names == [".lock", "iter_0000004", "iter_0000006"]


def test_a_checkpoint_has_the_checksum_of_its_data(results: dict[str, Any], folder: Path) -> None:
    values(results, "whole")
    found = read_facts(folder / "whole" / "checkpoints" / "iter_0000006")
    assert found.data_sha256 is not None
    assert found.data_sha256 == packed_sha256(found.recipe["data"]["path"])


def test_nothing_of_ours_is_in_the_state(results: dict[str, Any], folder: Path) -> None:
    values(results, "whole")
    metadata = folder / "whole" / "checkpoints" / "iter_0000006" / ".metadata"
    text = metadata.read_bytes()
    assert b"decoder.layers" in text
    assert b"megatron_magi" not in text
    assert b"magi" not in text


@pytest.mark.parametrize("name", ["changed", "changed_sharded"])
def test_a_resumed_run_follows_its_own_recipe(
    results: dict[str, Any], folder: Path, name: str
) -> None:
    assert [r[0] for r in values(results, name)] == [4, 5]
    fresh = columns(folder / "fresh" / "steps.csv")
    rates = [r["learning_rate"] for r in columns(folder / name / "steps.csv")]
    assert rates == [r["learning_rate"] for r in fresh[CUT_AT:]]


def test_a_finished_run_has_nothing_to_do(results: dict[str, Any]) -> None:
    assert values(results, "done") == []


def test_another_model_is_refused_on_every_rank(results: dict[str, Any]) -> None:
    error = values(results, "other")
    assert error.startswith("RecipeError: model, precision and optimizer must be those of the che")
    assert "model.num_layers 4 (saved: 2)" in error
