"""A run that was cut goes on as if it had not been: same bits, or another layout's same losses."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_magi.training.checkpoint.checkpoint_folder import (
    Checkpoint,
    checkpoint_to_load,
    finish,
    finish_weights,
    list_checkpoints,
    open_partial,
    order_changes,
)
from megatron_magi.training.process.whole_files import partial_folder
from megatron_magi.training.recipe.config import RunConfig
from megatron_magi.training.recipe.recipe import build_config
from megatron_magi.training.recipe.recipe_error import RecipeError

RELATIVE = 2e-5
CUT_AT = 3

LAYOUTS: dict[str, dict[str, Any]] = {
    "cp1": {},
    "cp4": {"cp": 4},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2_cp2": {"pp": 2, "cp": 2},
    "dp2": {"dp": 2},
}
SHARDED: dict[str, dict[str, Any]] = {
    "cp2_again": {"cp": 2},
    "dp2_sharded": {"dp": 2},
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
            # A copy to resume others from: the resumed run saves in its own folder.
            job("first_half", run="half", stop=True),
            job("resumed", run="cut", checkpoint={"load": "latest", "interval": 100}),
            *(layout(name, options, "half") for name, options in LAYOUTS.items()),
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
                    ("changed", {"cp": 2}, {"load": str(folder / "half" / "checkpoints")}),
                    (
                        "changed_sharded",
                        sharded,
                        {"load": str(folder / "half_sharded/checkpoints")},
                    ),
                )
            ),
            job("done", run="half", train={"iterations": CUT_AT}, checkpoint={"load": "latest"}),
            job(
                "other",
                checkpoint={"load": str(folder / "half" / "checkpoints")},
                model={"num_layers": 4},
            ),
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
    assert names == ["iter_0000004", "iter_0000006"]


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


# Folders, without training.


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(**sections: Any) -> RunConfig:
        import omegaconf

        plain = {"data": {"path": "x"}, "log": {"dir": str(tmp_path)}, **sections}
        return build_config([omegaconf.OmegaConf.create(plain)])

    return make


def write(config: RunConfig, iteration: int) -> Path:
    partial = open_partial(Path(config.log.dir) / config.name / "checkpoints", iteration)
    (partial / "weights").write_text("w")
    return finish(partial, config, iteration, iteration * 8, world_size=4)


def test_a_half_written_checkpoint_is_never_taken(config: Callable[..., RunConfig]) -> None:
    latest = config(checkpoint={"load": "latest"})
    whole = write(latest, 5)
    partial = open_partial(whole.parent, 6)
    (partial / "weights").write_text("w")
    (partial / "checkpoint.json").write_text((whole / "checkpoint.json").read_text())
    found = checkpoint_to_load(latest)
    assert found is not None and found.path == whole
    assert [c.iteration for c in list_checkpoints(whole.parent)] == [5]
    assert checkpoint_to_load(config(checkpoint={"load": str(whole)})) == found
    with pytest.raises(RecipeError, match="needs a whole checkpoint"):
        checkpoint_to_load(config(checkpoint={"load": str(partial)}))
    assert open_partial(whole.parent, 6) == partial
    assert not list(partial.iterdir())


def test_a_save_over_an_old_one_replaces_it(config: Callable[..., RunConfig]) -> None:
    first = write(config(), 5)
    (first / "old").write_text("")
    assert write(config(), 5) == first
    assert not (first / "old").exists()


@pytest.mark.parametrize("load", ["latest", "nowhere"])
def test_nothing_to_load_is_one_clear_error(config: Callable[..., RunConfig], load: str) -> None:
    wanted = config(checkpoint={"load": load})
    with pytest.raises(RecipeError, match=f"checkpoint.load={load} needs a whole checkpoint, got"):
        checkpoint_to_load(wanted)
    open_partial(Path(wanted.log.dir) / "run" / "checkpoints", 7)
    if load == "latest":
        with pytest.raises(RecipeError, match=r"unfinished: iter_0000007.partial"):
            checkpoint_to_load(wanted)
    assert checkpoint_to_load(config(checkpoint={"load": "auto"})) is None
    assert checkpoint_to_load(config()) is None


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("model", "hidden_size", 256),
        ("model", "vocab_size", 300),
        ("model", "tie_embeddings", False),
        ("train", "dtype", "bf16"),
        ("parallel", "distributed_optimizer", True),
    ],
)
def test_what_must_not_change(
    config: Callable[..., RunConfig], section: str, field: str, value: Any
) -> None:
    write(config(), 1)
    other = config(**{section: {field: value}, "checkpoint": {"load": "latest"}})
    with pytest.raises(RecipeError, match=rf"{section}.{field} {value} \(saved: .*load=null"):
        checkpoint_to_load(other)


def test_changed_data_is_noted(config: Callable[..., RunConfig]) -> None:
    write(config(), 1)
    later = config(checkpoint={"load": "latest"}, train={"seed": 5}, model={"rotary_base": 500000})
    found = checkpoint_to_load(later)
    assert isinstance(found, Checkpoint)
    assert order_changes(found, later) == ["train.seed: 1234 before, 5 now"]
    assert order_changes(found, dataclasses.replace(later, train=config().train)) == []


def write_weights(config: RunConfig, path: Path) -> Path:
    partial = partial_folder(path)
    (partial / "weights").write_text("w")
    return finish_weights(partial, config)


def test_imported_weights_fit_any_precision_and_sharding_but_one_shape(
    config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    weights = write_weights(config(), tmp_path / "llama-3.2")
    assert weights == tmp_path / "llama-3.2" and (weights / "weights").is_file()
    load = {"checkpoint": {"load": str(weights)}}
    fits = config(train={"dtype": "bf16"}, parallel={"distributed_optimizer": True}, **load)
    found = checkpoint_to_load(fits)
    assert found is not None and (found.weights_only, found.iteration) == (True, 0)
    with pytest.raises(RecipeError, match=r"model.hidden_size 256 \(saved: 128\)"):
        checkpoint_to_load(config(model={"hidden_size": 256}, **load))


def test_imported_weights_among_a_runs_checkpoints_are_not_its_own(
    config: Callable[..., RunConfig],
) -> None:
    keep1 = config(checkpoint={"keep": 1, "load": "latest"})
    own = write(keep1, 5)
    weights = write_weights(keep1, own.parent / "iter_0000009")
    found = checkpoint_to_load(keep1)
    assert found is not None and found.path == own and not found.weights_only
    newer = write(keep1, 6)
    assert sorted(own.parent.iterdir()) == [newer, weights]
    shutil.rmtree(newer)
    assert checkpoint_to_load(config(checkpoint={"load": "auto"})) is None


def test_facts_of_other_versions_are_read(config: Callable[..., RunConfig]) -> None:
    latest = config(checkpoint={"load": "latest"})
    facts = write(latest, 5) / "checkpoint.json"
    older = json.loads(facts.read_text())
    assert "weights_only" not in older  # what was saved before there were imported weights
    del older["recipe"]["model"]["rope_scaling_factor"]
    facts.write_text(json.dumps({**older, "some_later_fact": 1, "path": "elsewhere"}))
    found = checkpoint_to_load(latest)
    assert found is not None and (found.path, found.weights_only) == (facts.parent, False)
