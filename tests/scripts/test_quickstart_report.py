"""The quick start's verdict: passes what is right, refuses what is wrong or was not caught."""

from __future__ import annotations

import csv
import io
import json
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from tests.training.small_corpus import ByteTokenizer, Document, pack

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
LOSSES = np.linspace(5.5, 2.5, 20)


def write_run(folder: Path, losses: np.ndarray, grad_norms: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "steps.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        columns = ["iteration", "lm_loss", "grad_norm", "step_seconds", "tokens_per_second"]
        writer.writerow(columns)
        for i, (loss, grad_norm) in enumerate(zip(losses, grad_norms, strict=True), start=1):
            writer.writerow([i, loss, grad_norm, 0.5, 1000])
    gradients = folder / "save" / "wgrads" / "iter_0000010" / "mp_rank_00.pth"
    gradients.parent.mkdir(parents=True)
    factor = float(losses[0] / LOSSES[0])
    torch.save({"model_chunk0": {"weight": torch.ones(4) * factor}}, gradients)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.RandomState(0)
    texts = [bytes(97 + rng.randint(0, 8, n).astype(np.uint8)) for n in rng.randint(5, 4000, 60)]
    pack((Document(f"d{i}", t) for i, t in enumerate(texts)), folder / "data", ByteTokenizer())
    path = folder / "recipe.yaml"
    path.write_text(f"data: {{path: {folder / 'data'}}}\n")
    return path


@dataclass(frozen=True)
class Ended:
    """How a run of the script ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def report(runs: Path, recipe: Path, *arguments: str) -> Ended:
    """Run the script in this process, which has imported what it needs."""
    script = str(ROOT / "scripts" / "quickstart_report.py")
    argv = [script, str(runs), "--recipe", str(recipe), *arguments]
    out, err = io.StringIO(), io.StringIO()
    printed = redirect_stdout(out), redirect_stderr(err)
    with (
        mock.patch.object(sys, "argv", argv),
        printed[0],
        printed[1],
        pytest.raises(SystemExit) as end,
    ):
        runpy.run_path(script, run_name="__main__")
    return Ended(int(end.value.code or 0), out.getvalue(), err.getvalue())


def test_right_passes_and_wrong_is_caught(tmp_path: Path, recipe: Path) -> None:
    ones = np.ones_like(LOSSES)
    write_run(tmp_path / "dense", LOSSES, ones)
    write_run(tmp_path / "magi", LOSSES * (1 + 1e-6), ones * (1 + 1e-6))
    write_run(tmp_path / "moved_boundary", LOSSES * (1 + 1e-3), ones)
    record, image = tmp_path / "record.json", tmp_path / "both.png"
    run = report(tmp_path, recipe, "--record", str(record), "--image", str(image))
    assert run.returncode == 0, run.stderr
    verdicts = [line.rsplit("|", 1)[-1].strip() for line in run.stdout.splitlines()]
    assert [v for v in verdicts if v in ("baseline", "PASS", "caught")] == [
        "baseline",
        "PASS",
        "caught",
    ]
    assert "next: torchrun -m megatron_magi.run pretrain_gpt.py" in run.stdout
    for picture in (tmp_path / "loss.png", tmp_path / "mask.png", image):
        assert picture.read_bytes()[:4] == b"\x89PNG"
    written = json.loads(record.read_text())
    assert "e-07 (step 10, 1 parameters, allowed 1e-04); moved" in run.stdout
    assert len(written["rows"]) == 60
    shares = written["shares"]
    for name in ("zigzag per sequence", "zigzag per document", "megatron_magi"):
        tiles = np.array(shares[name]["tiles"])
        assert shares[name]["imbalance"] == pytest.approx(tiles.max() / tiles.mean(), abs=1e-4)
    ours, usual = shares["megatron_magi"], shares["zigzag per sequence"]
    assert ours["imbalance"] < usual["imbalance"]
    assert ours["keys_received"] == ours["keys_needed"]
    assert max(usual["keys_needed"]) < min(usual["keys_received"])


@pytest.mark.parametrize(
    ("magi", "moved", "says"),
    [
        (1 + 1e-3, 1 + 1e-3, "FAIL"),
        (1.0, 1 + 1e-6, "NOT CAUGHT"),
        (np.nan, 1 + 1e-3, "FAIL"),
    ],
    ids=["wrong", "not_caught", "nan"],
)
def test_anything_else_fails(
    tmp_path: Path, recipe: Path, magi: float, moved: float, says: str
) -> None:
    ones = np.ones_like(LOSSES)
    for name, factor in (("dense", 1.0), ("magi", magi), ("moved_boundary", moved)):
        write_run(tmp_path / name, LOSSES * factor, ones)
    run = report(tmp_path, recipe)
    assert run.returncode == 1, run.stderr
    assert says in run.stdout and "next:" not in run.stdout


def test_runs_that_learn_nothing_prove_nothing(tmp_path: Path, recipe: Path) -> None:
    flat, ones = np.full_like(LOSSES, 5.5), np.ones_like(LOSSES)
    for name, factor in (("dense", 1.0), ("magi", 1.0), ("moved_boundary", 1.1)):
        write_run(tmp_path / name, flat * factor, ones)
    run = report(tmp_path, recipe)
    assert run.returncode == 1
    assert "the baseline's loss did not fall" in run.stdout


def test_a_missing_run_is_one_clear_error(tmp_path: Path, recipe: Path) -> None:
    script = str(ROOT / "scripts" / "quickstart_report.py")
    run = subprocess.run(
        [sys.executable, script, str(tmp_path), "--recipe", str(recipe)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 2
    assert run.stderr.startswith("error: a run to compare must have a steps.csv")
