"""scripts/pretrain.py as a user runs it: a short training run, its errors and its files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.compare.differences import compare
from megatron_magi.compare.read_run import read_run
from tests.training.small_corpus import ByteTokenizer, Document, pack

pytestmark = pytest.mark.slow  # the own trainer, which is changed no more

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "own_trainer" / "tiny_llama_cpu.yaml"
SMALL = (
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "data.seq_length=192",
    "train.global_batch_size=2",
    "train.iterations=4",
    "optimizer.warmup_iters=0",
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrain")
    rng = np.random.RandomState(0)
    texts = [bytes(97 + rng.randint(0, 8, n).astype(np.uint8)) for n in rng.randint(5, 150, 60)]
    documents = (Document(f"d{i}", t) for i, t in enumerate(texts))
    pack(documents, folder / "data", ByteTokenizer())
    return folder


def pretrain(
    folder: Path, *overrides: str, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *overrides, launcher=launcher),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=environment(),
    )


def command(folder: Path, *overrides: str, launcher: tuple[str, ...] = ()) -> list[str]:
    script = str(ROOT / "scripts" / "pretrain.py")
    where = (f"data.path={folder / 'data'}", f"log.dir={folder}")
    return [sys.executable, *launcher, script, str(RECIPE), *SMALL, *where, *overrides]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_a_moved_boundary_does_not_pass(folder: Path) -> None:
    wrong = pretrain(folder, "name=wrong", "data.moved_boundary=1")
    assert wrong.returncode == 0, wrong.stderr
    baseline = pretrain(folder, "name=right", "parallel.cp=1")
    assert baseline.returncode == 0, baseline.stderr
    comparison = compare(read_run(folder / "wrong"), read_run(folder / "right"))
    assert not comparison.passed
    assert comparison.first_step > 1e-4


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_and_names_documents(folder: Path) -> None:
    run = pretrain(folder, "name=nan", "parallel.cp=1", "model.init_std=3e18")
    assert run.returncode == 1
    assert "error: rank 0: the loss must be finite" in run.stderr, run.stderr
    assert "rank 0: sample" in run.stderr
    assert "(d" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("checkpoint.load=latest", "needs a whole checkpoint, got none in"),
        ("train.iteration=3", "did you mean 'train.iterations'?"),
        ("data.path=nowhere", "no nowhere.bin"),
        ("parallel.dp=3", "global_batch_size must be a multiple of the data-parallel size 3"),
    ],
    ids=["checkpoint", "typo", "data", "batch"],
)
def test_a_bad_recipe_ends_before_any_process_starts(
    folder: Path, override: str, says: str
) -> None:
    run = pretrain(folder, "name=bad", override)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert says in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (folder / "bad").exists()


def test_torchrun_with_another_world_is_refused(folder: Path) -> None:
    run = pretrain(folder, "parallel.cp=3", launcher=TORCHRUN)
    assert run.returncode != 0
    assert run.stderr.count("the number of processes must be a multiple of") == 1
    assert "got 2" in run.stderr


def test_the_whole_recipe_can_be_printed(folder: Path) -> None:
    run = pretrain(folder, "--print-config")
    assert run.returncode == 0
    assert "global_batch_size: 2" in run.stdout
    assert "overlap_degree: null" in run.stdout


def test_a_dry_run_starts_nothing(folder: Path) -> None:
    run = pretrain(folder, "name=dry", "--dry-run", "parallel.dp=2")
    assert run.returncode == 0, run.stderr
    assert "4 processes: tp 1 pp 1 cp 2 dp 2" in run.stdout
    assert not (folder / "dry").exists()
