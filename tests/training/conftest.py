"""Packed data, small recipes, and the worker that trains them in worlds of forked processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_magi.training.corpus import ByteTokenizer, Document, pack

HERE = Path(__file__).parent
WORKER = HERE.parent / "adapter" / "layout_worker.py"
WORKER_TIMEOUT_S = 280


@pytest.fixture(scope="session")
def packed_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of 200 packed documents of 5 to 150 tokens."""
    prefix = tmp_path_factory.mktemp("packed") / "data"
    rng = np.random.RandomState(0)
    texts = [bytes(97 + rng.randint(0, 8, n).astype(np.uint8)) for n in rng.randint(5, 150, 200)]
    pack((Document(f"d{i}", t) for i, t in enumerate(texts)), prefix, ByteTokenizer())
    return prefix


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
    """Run jobs of training_jobs.py (see layout_worker) and return their results by name."""

    def run(jobs: list[dict[str, Any]]) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("jobs")
        (folder / "jobs.json").write_text(json.dumps(jobs))
        # The path of a tried megatron-core stays in front; the package comes from this checkout.
        path = [os.environ.get("PYTHONPATH"), str(HERE.parent.parent), str(HERE)]
        worker = subprocess.Popen(
            [
                sys.executable,
                str(WORKER),
                f"{folder}/jobs.json",
                f"{folder}/out.json",
                "training_jobs",
            ],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = worker.communicate(timeout=WORKER_TIMEOUT_S)
        finally:
            # The worker and every process it forked, also when the time is over.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        assert worker.returncode == 0, output[-4000:]
        answers: dict[str, Any] = json.loads((folder / "out.json").read_text())
        answers["output"] = output
        return answers

    return run
