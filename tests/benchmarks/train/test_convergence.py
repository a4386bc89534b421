"""The convergence runner: its sets, and a scheduler that never gives a GPU to two runs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.train import convergence as runner
from megatron_magi.cli.parser import UsageError
from megatron_magi.training.recipe.recipe import load_recipe

pytestmark = pytest.mark.slow  # the own trainer, which is changed no more

ROOT = Path(__file__).parents[3]
JOB = """
import os, sys, time
print("begin", os.environ["CUDA_VISIBLE_DEVICES"], time.monotonic())
time.sleep(float(sys.argv[2]))
print("end", time.monotonic())
sys.exit(int(sys.argv[1]))
"""


def fake(name: str, gpus: int, code: int = 0, seconds: float = 0.4) -> Any:
    """A run that waits a moment, says which GPUs it saw, and ends with this exit code."""

    class Fake(runner.Run):  # type: ignore[misc, name-defined]
        def command(self, data: str, work: Path) -> list[str]:
            return [sys.executable, "-c", JOB, str(code), str(seconds)]

    return Fake(name, "recipe", (), gpus)


def options(tmp_path: Path, gpus: int) -> argparse.Namespace:
    places = {"work": tmp_path / "work", "out": tmp_path / "out"}
    return argparse.Namespace(gpus=tuple(range(gpus)), data="x", seconds=1e9, **places)


def corpus(tmp_path: Path) -> str:
    """The prefix of files that no fake run reads."""
    for suffix in ("bin", "idx"):
        (tmp_path / f"corpus.{suffix}").touch()
    return str(tmp_path / "corpus")


def times(tmp_path: Path, name: str) -> tuple[set[int], float, float]:
    """GPUs, begin and end of a fake run, from its log in the record."""
    first, last = (tmp_path / "out" / name / "log.txt").read_text().splitlines()
    _, visible, begin = first.split()
    return {int(gpu) for gpu in visible.split(",")}, float(begin), float(last.split()[1])


def test_no_gpu_has_two_runs_and_failures_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    widths = {"a": 1, "b": 1, "c": 2, "bad": 1, "e": 1}
    runs = [fake(n, w, code=3 if n == "bad" else 0) for n, w in widths.items()]
    assert runner.run_all(runs, options(tmp_path, 2)) == ["bad"]
    seen = {name: times(tmp_path, name) for name in widths}
    for name, width in widths.items():
        assert len(seen[name][0]) == width and seen[name][0] <= {0, 1}
    together = []
    for i, one in enumerate(widths):
        for two in list(widths)[i + 1 :]:
            (gpus, begin, end), (others, begin_two, end_two) = seen[one], seen[two]
            if begin < end_two and begin_two < end:
                together.append((one, two))
                assert not gpus & others, (one, two)
    assert ("a", "b") in together, "two runs of one GPU go side by side"
    codes = {n: json.loads((tmp_path / "out" / n / "run.json").read_text()) for n in widths}
    assert [facts["exit_code"] for facts in codes.values()] == [0, 0, 0, 3, 0]
    assert "bad: exit 3" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1)])
def test_the_exit_code_is_that_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: int
) -> None:
    monkeypatch.setattr(runner, "all_sets", lambda: {"set": [fake("one", 1, code)]})
    words = ["x", "set", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*words, "--data", corpus(tmp_path)])
    assert runner.main() == expected


def test_a_run_wider_than_the_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever."""
    monkeypatch.setattr(runner, "all_sets", lambda: {"set": [fake("wide", 2)]})
    monkeypatch.setattr(sys, "argv", ["x", "set", "--gpus", "0", "--work", str(tmp_path)])
    begin = time.monotonic()
    with pytest.raises(UsageError, match="wide needs 2 GPUs"):
        runner.main()
    assert time.monotonic() - begin < 5


def test_at_the_last_second_runs_are_ended_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [fake("slow", 1, seconds=60), fake("never", 1)]
    monkeypatch.setattr(runner, "all_sets", lambda: {"set": runs})
    places = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["x", "set", "--gpus", "3", "--seconds", "2", *places,
                                      "--data", corpus(tmp_path)])  # fmt: skip
    begin = time.monotonic()
    assert runner.main() == 1
    assert time.monotonic() - begin < 30
    facts = json.loads((tmp_path / "out" / "slow" / "run.json").read_text())
    assert facts["exit_code"] == -9
    assert not (tmp_path / "out" / "never").exists()


def test_an_unknown_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "nonsense"])
    with pytest.raises(UsageError, match="got nonsense"):
        runner.main()


def test_list_shows_every_set_and_starts_nothing(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.train.convergence", "--list"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr
    lines = dict(line.split(": ", 1) for line in ran.stdout.splitlines())
    assert "b_flex, b_noise" in lines["b_documents"] and "b_1_tile" in lines["b_gates_1"]
    assert not list(tmp_path.iterdir())


def test_every_run_is_a_recipe_that_loads_on_as_many_gpus_as_it_takes(tmp_path: Path) -> None:
    runs = [run for group in runner.all_sets().values() for run in group]
    assert len(set(runs)) == len({run.name for run in runs}), "a name is a folder, of one run"
    assert not {run.name for run in runs} & set(runner.all_sets()), "a name is a run or a set"
    for run in runs:
        words = run.command("nowhere", tmp_path)
        config = load_recipe(run.recipe, words[words.index(run.recipe) + 1 :])
        assert config.parallel.num_processes == run.gpus and config.name == run.name
        other_parts = run.name in ("b_noise_fused", "b_sdpa_causal_fused", "a_noise_unfused")
        unfused = run.name.startswith("b_") != other_parts
        assert config.model.fused == ("off" if unfused else "auto")
        assert run.error is None or words[1:4] == [
            "-m",
            "tests.convergence.broken_train",
            run.error,
        ]
        if config.checkpoint.load is not None:
            source = Path(config.checkpoint.load).relative_to(tmp_path).parts[0]
            assert source in {r.name for r in runs}


def test_the_archive_holds_what_compare_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = tmp_path / "work" / "one" / "gradient_errors.csv"
    late.parent.mkdir(parents=True)
    late.write_text("iteration\n")
    (late.parent / "weights.bin").write_text("large")
    places = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["x", *places, "--archive", str(tmp_path / "all.tar.xz")])
    assert runner.main() == 0
    with tarfile.open(tmp_path / "all.tar.xz") as archive:
        files = [member.name for member in archive if member.isfile()]
    assert files == ["out/one/gradient_errors.csv"]
