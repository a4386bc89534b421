"""Experiments: a run that was written is read as it was, and what is wrong is said."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib import experiment as program
from benchmarks.lib.experiment import SavedRun
from megatron_magi.cli.parser import UsageError
from megatron_magi.compare.gradient_errors import ERRORS, Baseline, gradient_errors, read_errors
from megatron_magi.compare.model_facts import ModelFacts
from megatron_magi.compare.positions import Bucket
from megatron_magi.compare.read_run import read_run, read_run_and_facts
from megatron_magi.compare.run_error import RunError
from tests.cli.command import Capture, run
from tests.compare.event_runs import write_events
from tests.compare.evidence import curves, gradient_error
from tests.compare.written_positions import write_positions

STEPS = """iteration,lm_loss,grad_norm,step_seconds,tokens_per_second,loss_tokens,validation_loss
7,10.123456789012345,nan,0.1,100.5,64,
8,9.5,0.30000000000000004,1e-05,3.0,60,4.25
9,inf,2.5,2.8371999999999997,7.0,64,
"""


def assert_equal(one: Path, other: Path) -> None:
    """Curves with all digits, facts of the model, and gradient errors."""
    (ours, model), (theirs, other_model) = map(read_run_and_facts, (one, other))
    assert model == other_model and read_errors(one) == read_errors(other)
    for name in (field.name for field in fields(ours)):
        np.testing.assert_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """A run with everything that a folder may have, and one of event files."""
    full, events = tmp_path / "full", tmp_path / "events"
    full.mkdir()
    (full / "steps.csv").write_text(STEPS)
    (full / "model.json").write_text(
        '{"dtype": "fp32", "vocab_size": 128, "logit_variance": 0.0032}'
    )
    write_positions(full, {Bucket(8, 0, 16): 4.5, Bucket(8, 16, 32): 4.1})
    (full / ERRORS).write_text(
        "iteration,parameter,norm,baseline_norm,relative_error,baseline\n"
        '1,embedding,0.1,0.2,inf,"mean of a, b"\n'
        '1,output,1.5,1.25,0.30000000000000004,"mean of a, b"\n'
    )
    write_events(events, {i: 5.0 + 1 / i for i in range(1, 13)}, validation={6: 4.1})
    return [full, events]


def make(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["experiment", *map(str, words)])
    return program.main()


def test_a_round_trip_changes_nothing(
    tmp_path: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.json"
    meta = ["--meta", "command=a", "--meta", "gpu=H100 x=1", "--meta", "command=b"]
    assert make(monkeypatch, file, *folders, *meta) == 0
    for folder in folders:
        assert_equal(folder, file / folder.name)
    record = json.loads(file.read_text())
    assert record["meta"] == {"command": ["a", "b"], "gpu": "H100 x=1"}
    assert "positions" not in record["runs"]["events"]
    (line,) = [x for x in file.read_text().splitlines() if '"grad_norm": ["nan"' in x]
    assert line.strip() == '"grad_norm": ["nan", 0.30000000000000004, 2.5],'


def test_a_written_experiment_is_read_and_made_again(tmp_path: Path) -> None:
    one, file = curves("one", np.array([3.0, 2.0]), num_processes=4), tmp_path / "x.json"
    errors = [asdict(gradient_error("weight", 0.25))]
    runs = [SavedRun(one, ModelFacts("bf16", 128, 0.5), errors), SavedRun(replace(one, name="b"))]
    program.write(file, runs, {"date": "today"}, verdicts={"one": "PASS\n"})
    assert json.loads(file.read_text())["verdicts"] == {"one": "PASS\n"}
    assert read_run(file / "one").num_processes == 4 and read_run(file / "b").name == "b"
    plain = Baseline((tmp_path / "plain",))
    assert gradient_errors(file / "one", plain) == [gradient_error("weight", 0.25)]
    assert gradient_errors(file / "b", plain) == []
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_compare_takes_paths_in_an_experiment(tmp_path: Path, capsys: Capture) -> None:
    file, losses = tmp_path / "x.json", np.array([3.0, 2.0])
    runs = [SavedRun(curves("one", losses)), SavedRun(curves("two", losses * 1.5))]
    program.write(file, runs, {})
    words = ("compare", f"{file}/one", f"{file}/one", "--no-figure", "--quiet")
    assert run(capsys, *words)[0] == 0
    assert run(capsys, *words, "--expect-fail", f"{file}/two")[0] == 0
    code, _, err = run(capsys, "compare", f"{file}/one", f"{file}/three", "--no-figure")
    assert code == 2 and "got three in" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        ('{"runs": {"b": {}, "a": {}}}', "x.json/c", "got c in .*; name one of a, b$"),
        ('{"runs": {"b": {}, "a": {}}}', "x.json", "got none in .*; name one of a, b$"),
        ("", "y.json/a", "must be in a file, got .*No such file"),
        ('{"runs": {"a"', "x.json/a", "must be JSON with the columns .*got JSONDecodeError"),
        ('{"rows": []}', "x.json/a", r"got KeyError\('runs'\) in .*; restore it"),
        ("[]", "x.json/a", "got TypeError.* in .*; restore it"),
        ('{"runs": {"a": {}}}', "x.json/a", "got KeyError.* in the run a in .*; restore it"),
    ],
)
def test_what_is_no_run_is_said(tmp_path: Path, text: str, path: str, says: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(RunError, match=says):
        read_run(tmp_path / path)


@pytest.mark.parametrize(
    "change", [{"loss": [1.0]}, {"loss": ["x", "y"]}, {"validation": []}, {"model": {"a": 1}}]
)
def test_broken_columns_are_said(tmp_path: Path, change: dict[str, object]) -> None:
    file = tmp_path / "x.json"
    program.write(file, [SavedRun(curves("a", np.ones(2)))], {})
    record = json.loads(file.read_text())
    record["runs"]["a"].update(change)
    file.write_text(json.dumps(record))
    with pytest.raises(RunError, match="in the run a in"):
        read_run(file / "a")


def test_broken_gradients_are_said(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for broken in ({"iteration": [1], "norm": []}, {"iteration": [1]}, 3):
        file.write_text(json.dumps({"runs": {"a": {"gradients": broken}}}))
        with pytest.raises(RunError, match="must have the columns and numbers"):
            read_errors(file / "a")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("x.txt full", "must end in .json, got x.txt"),
        ("x.json full more/full", "different names, got 2 of full"),
        ("x.json full --meta gpu", "must be KEY=VALUE, got 'gpu'"),
        ("x.json nothing", "must have a steps.csv or TensorBoard events, got none"),
    ],
)
def test_what_makes_no_experiment_is_refused(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=says):
        make(monkeypatch, *words.split())
