"""Packed data, small recipes, and the worker that trains them in worlds of forked processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.megatron_worker import run_jobs_of
from tests.training.small_corpus import ByteTokenizer, Document, pack

JOBS = Path(__file__).parent / "training_jobs.py"
WORKER_TIMEOUT_S = 280


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The own trainer is changed no more, so that only `scripts/test.sh --all` tests it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def packed_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of 200 packed documents of 5 to 150 tokens."""
    prefix = tmp_path_factory.mktemp("packed") / "data"
    rng = np.random.RandomState(0)
    texts = [bytes(97 + rng.randint(0, 8, n).astype(np.uint8)) for n in rng.randint(5, 150, 200)]
    pack((Document(f"d{i}", t) for i, t in enumerate(texts)), prefix, ByteTokenizer())
    return prefix


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of a module's jobs lie."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def tiny_recipe(packed_data: Path) -> Callable[..., dict[str, Any]]:
    """A recipe of a two-layer model; sections and values given by name are merged over it."""

    def make(name: str, folder: Path, **sections: Any) -> dict[str, Any]:
        recipe: dict[str, Any] = {
            "name": name,
            "model": {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64},
            "data": {"path": str(packed_data), "seq_length": 96},
            "train": {"iterations": 6, "global_batch_size": 2},
            "optimizer": {"lr": 2e-3, "warmup_iters": 1},
            "log": {"dir": str(folder), "interval": 100, "progress": False},
        }
        for section, values in sections.items():
            is_section = isinstance(values, dict)
            recipe[section] = {**recipe.get(section, {}), **values} if is_section else values
        return recipe

    return make


@pytest.fixture(scope="session")
def run_training_jobs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Run jobs of training_jobs.py and return their results by name."""
    return lambda jobs: run_jobs_of(JOBS, jobs, tmp_path_factory.mktemp("jobs"), WORKER_TIMEOUT_S)
