"""Dumped gradients are torch.autograd's, in every layout, and dumping changes no training."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_magi.compare.gradient_folder import (
    dumped_iterations,
    gradient_path,
    read_gradient,
    read_shapes,
)
from tests.training.test_checkpoint import columns

pytestmark = pytest.mark.slow

RELATIVE = 1e-5
ITERATION = 2
SHARDED = {"distributed_optimizer": True}
OVERLAPPED = {"overlap_grad_reduce": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "cp2": {"cp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "dp2_overlapped": {"dp": 2, **OVERLAPPED},
    "dp2_sharded_overlapped": {"dp": 2, **SHARDED, **OVERLAPPED, "overlap_param_gather": True},
    "pp2_dp2_sharded": {"pp": 2, "dp": 2, **SHARDED, **OVERLAPPED},
    "tp2_cp2_sharded": {"tp": 2, "cp": 2, **SHARDED},
}
"""All with tied embeddings, which two stages hold under pp 2."""


@pytest.fixture(scope="module")
def results(
    folder: Path,
    tiny_recipe: Callable[..., dict[str, Any]],
    run_training_jobs: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    dumped = {"iterations": ITERATION, "global_batch_size": 2, "dump_gradients": [1, ITERATION, 9]}

    def job(name: str, options: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
        # Clipping at a small norm: a gradient taken after clipping would be another one.
        recipe = tiny_recipe(name, folder, parallel=options, train=train)
        recipe["optimizer"]["clip_grad"] = 0.01
        sizes = [options.get(axis, 1) for axis in ("tp", "pp", "cp", "dp")]
        return {"name": name, "function": "train", "kwargs": {"recipe": recipe},
                "world": int(np.prod(sizes))}  # fmt: skip

    jobs = [job(name, options, dumped) for name, options in {"whole": {}, **LAYOUTS}.items()]
    jobs.append(job("undumped", LAYOUTS["dp2_sharded_overlapped"], dumped | {"dump_gradients": []}))
    autograd = job("autograd", {}, dumped)
    autograd["function"] = "autograd_gradients"
    autograd["kwargs"]["path"] = str(folder / "autograd.npz")
    return run_training_jobs([*jobs, autograd])


def whole(results: dict[str, Any], name: str) -> None:
    assert "error" not in results[name], results[name]["error"]


def relative_error(ours: np.ndarray, baseline: np.ndarray) -> float:
    return float(np.linalg.norm(ours - baseline) / np.linalg.norm(baseline))


@pytest.mark.slow
def test_a_dump_is_autograds_gradient_of_the_mean_loss(
    results: dict[str, Any], folder: Path
) -> None:
    whole(results, "whole")
    whole(results, "autograd")
    with np.load(folder / "autograd.npz") as expected:
        assert set(read_shapes(folder / "whole", 1)) == set(expected)
        for name in expected:
            ours = read_gradient(folder / "whole", 1, name)
            assert ours.dtype == np.float32 and ours.shape == expected[name].shape, name
            assert relative_error(ours, expected[name]) < RELATIVE, name


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_writes_the_same(results: dict[str, Any], folder: Path, name: str) -> None:
    whole(results, name)
    assert dumped_iterations(folder / name) == [1, ITERATION]
    shapes = read_shapes(folder / "whole", ITERATION)
    assert list(read_shapes(folder / name, ITERATION).items()) == list(shapes.items())
    for iteration in (1, ITERATION):
        for parameter in shapes:
            ours, baseline = (
                read_gradient(folder / run, iteration, parameter) for run in (name, "whole")
            )
            assert relative_error(ours, baseline) < RELATIVE, (iteration, parameter)


def test_names_count_layers_over_stages_and_embeddings_once(
    results: dict[str, Any], folder: Path
) -> None:
    whole(results, "pp2")
    names = list(read_shapes(folder / "pp2", 1))
    assert names[0] == "embedding.word_embeddings.weight" and "output_layer.weight" not in names
    assert {n.split(".")[2] for n in names if n.startswith("decoder.layers.")} == {"0", "1"}
    files = {p.stem for p in gradient_path(folder / "pp2", 1).glob("*.npy")}
    assert files == set(names)


def test_norms_are_those_of_the_files(results: dict[str, Any], folder: Path) -> None:
    whole(results, "tp2_sp")
    with (gradient_path(folder / "tp2_sp", 1) / "norms.csv").open(newline="") as file:
        rows = {r["parameter"]: r for r in csv.DictReader(file)}
    for name, shape in read_shapes(folder / "tp2_sp", 1).items():
        gradient = read_gradient(folder / "tp2_sp", 1, name)
        assert rows[name]["shape"] == "x".join(map(str, shape))
        assert float(rows[name]["norm"]) == pytest.approx(np.linalg.norm(gradient), rel=1e-6)


def test_the_norm_of_all_is_what_the_optimizer_saw(results: dict[str, Any], folder: Path) -> None:
    whole(results, "whole")
    steps = columns(folder / "whole" / "steps.csv")
    for iteration in (1, ITERATION):
        with (gradient_path(folder / "whole", iteration) / "norms.csv").open(newline="") as file:
            norms = [float(r["norm"]) for r in csv.DictReader(file)]
        seen = float(steps[iteration - 1]["grad_norm"])
        assert seen > 0.02  # clipping at 0.01 did something
        assert np.linalg.norm(norms) == pytest.approx(seen, rel=1e-5)


def test_dumping_changes_no_step(results: dict[str, Any], folder: Path) -> None:
    whole(results, "undumped")
    dumped = columns(folder / "dp2_sharded_overlapped" / "steps.csv")
    assert dumped == columns(folder / "undumped" / "steps.csv")
    assert dumped_iterations(folder / "undumped") == []
