"""Runs that are read from Megatron's TensorBoard folder."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.compare.model_facts import ModelFacts
from megatron_magi.compare.read_run import read_run, read_run_and_facts
from megatron_magi.compare.run_error import RunError
from tests.cli.command import Capture, run
from tests.compare.event_runs import write_events

pytest.importorskip("tensorboard")
LOSSES = {step: 5.5 - 0.25 * step for step in range(1, 13)}


def test_curves_facts_and_speed_are_read(tmp_path: Path) -> None:
    write_events(tmp_path / "job" / "tensorboard", LOSSES, validation={6: 4.5, 12: 3.0})
    curves, facts = read_run_and_facts(tmp_path / "job")
    assert (curves.name, curves.first_iteration, curves.num_processes) == ("job", 1, 2)
    assert curves.loss.tolist() == list(LOSSES.values())
    assert curves.grad_norm.tolist() == [1.0] * 12
    assert curves.validation == {6: 4.5, 12: 3.0}
    assert curves.loss_tokens == 4 * 128 and curves.median_tokens_per_second == 4 * 128 / 2
    assert facts == ModelFacts("bf16", 384, 16 * 0.02**2)


def test_the_last_value_of_a_step_that_was_trained_twice_counts(tmp_path: Path) -> None:
    write_events(tmp_path, {1: 5.0, 2: 4.0, 3: 9.0})
    write_events(tmp_path, {3: 3.0, 4: 2.0})
    assert read_run(tmp_path).loss.tolist() == [5.0, 4.0, 3.0, 2.0]


def test_an_earlier_start_that_went_further_is_refused(tmp_path: Path) -> None:
    """Its last iterations would count as those of the later job."""
    write_events(tmp_path, {1: 5.0, 2: 4.0, 3: 3.0, 4: 9.0})
    write_events(tmp_path, {1: 5.0, 2: 4.0, 3: 3.0}, began=100.0)
    with pytest.raises(RunError, match=r"got iteration 4 from before iteration 3 in .*remove its"):
        read_run(tmp_path)
    write_events(tmp_path, {3: 3.0, 4: 2.0, 5: 1.0}, began=200.0)
    assert read_run(tmp_path).loss.tolist() == [5.0, 4.0, 3.0, 2.0, 1.0]


def test_a_job_that_logs_no_arguments_has_no_facts_and_no_speed(
    capsys: Capture, tmp_path: Path
) -> None:
    tags = {"loss": "reduced_train_loss", "norm": "grad_norm", "validation": "val_loss"}
    names = ("a", "b")
    for name in names:
        write_events(tmp_path / name, LOSSES, {}.fromkeys(LOSSES, 2.0), {12: 3.0}, {}, tags)
    curves, facts = read_run_and_facts(tmp_path / "a")
    assert facts is None and curves.num_processes is None and curves.validation == {12: 3.0}
    assert np.isnan(curves.median_tokens_per_second)
    code, out, _ = run(capsys, "compare", *(str(tmp_path / n) for n in names), "--no-figure")
    assert code == 0 and out.count("speed not recorded") == 2


@pytest.mark.parametrize(
    "losses, norms",
    [({1: 5.0, 3: 4.0}, None), ({1: 5.0, 2: 4.0}, {1: 1.0}), ({}, None)],
    ids=["gap", "no_norm", "empty"],
)
def test_every_step_needs_its_loss_and_norm(
    tmp_path: Path, losses: dict[int, float], norms: dict[int, float] | None
) -> None:
    write_events(tmp_path, losses, norms)
    with pytest.raises(RunError, match=r"of every iteration, got .*--tensorboard-log-interval 1"):
        read_run(tmp_path)


def test_two_jobs_in_one_folder_are_no_run(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_events(tmp_path / name, LOSSES)
    with pytest.raises(RunError, match=r"one folder of TensorBoard events, got .*first and .*sec"):
        read_run(tmp_path)
    with pytest.raises(RunError, match=r"got none in .*nothing; train it with --tensorboard-dir"):
        read_run(tmp_path / "nothing")


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_events(tmp_path, LOSSES)
    name = "tensorboard.backend.event_processing.event_accumulator"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RunError, match=r"pip install 'megatron-magi\[tensorboard\]'"):
        read_run(tmp_path)


def test_jobs_are_judged_with_noise_and_a_control(capsys: Capture, tmp_path: Path) -> None:
    """As runs with a steps.csv are; the dtype and the vocabulary come from the arguments."""
    steps = np.arange(1, 81)
    curve = 1 + 4.95 * np.exp((1 - steps) / 10.0)
    rng = np.random.default_rng(0)
    for name, size in (("te", 0.0), ("flash", 1e-4), ("magi", 1e-4), ("moved", 3e-2)):
        loss = curve * (1 + size * rng.normal(size=80) * (steps > 1))
        losses = dict(zip(steps.tolist(), loss.tolist(), strict=True))
        write_events(tmp_path / name, losses, validation={80: float(loss[-1])})
    te, flash, magi, moved = (str(tmp_path / n) for n in ("te", "flash", "magi", "moved"))
    options = ("--noise", flash, "--expect-fail", moved, "--no-figure", "--loss-drop", "4")
    code, out, _ = run(capsys, "compare", te, magi, *options)
    assert "bf16" in out.splitlines()[0] and "vocabulary 384" in out
    assert "magi: PASS" in out and "moved: CAUGHT by" in out and code == 0
