"""The queue of Llama-3 1B runs: what each run is told, and what happens to those that fail."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.train import early_start, llama, llama_cases
from benchmarks.train.llama_cases import Case
from tests.cli.command import Capture

BASE = ["--bf16", "--lr", "1"]


def options(out: Path, **given: Any) -> Any:
    usual = {"out": out, "gpus": ["0", "1"], "recipe": "llama3_1b_1gpu", "data": "mock", "more": []}
    return SimpleNamespace(**{**usual, "weights": None, "only": [], "limit_s": 60, **given})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """Commands and GPUs of runs, which do nothing; those of `bad` end with 3."""
    seen: list[tuple[list[str], str]] = []

    class FakeRun:
        def __init__(self, command: list[str], env: dict[str, str], stdout: Any, **more: Any):
            seen.append((command, env["CUDA_VISIBLE_DEVICES"]))
            stdout.write(" iteration 1/1 | lm loss: 2.0\n")
            self.gate = Path(env[early_start.GATE])
            assert not self.gate.exists()
            self.code = 3 if "--bad" in command else 0

        def wait(self, limit_s: float) -> int:
            assert self.gate.exists(), "it has its GPUs now"
            return self.code

    monkeypatch.setattr(llama.subprocess, "Popen", FakeRun)
    return seen


def test_gradients_have_one_set_of_weights_and_a_truth_for_each_control() -> None:
    cases = {case.name: case for case in llama_cases.gradients()}
    for name, case in cases.items():
        words = case.words(BASE, Path("out"), Path("weights"))
        assert words[words.index("--load") + 1] == "weights" and "--finetune" in words
        assert words[-1] == "--no-load-rng" and "--save-wgrads-interval" in words
        assert ("--bf16" in words) == (not name.startswith("fp32")), name
        assert words[len(words) - 1 - words[::-1].index("--lr") + 1] == "0"
    for control in llama_cases.CONTROLS:
        truth, run = cases[f"fp32_{control}"], cases[f"magi_{control}"]
        assert truth.flags[truth.flags.index("--magi-mask") + 1] == (
            run.flags[run.flags.index("--magi-mask") + 1])  # fmt: skip
    assert cases["fp32"].flags.count("layer_spec") == 1


def test_runs_have_gpus_of_their_own_and_are_not_made_twice(
    tmp_path: Path, started: list[tuple[list[str], str]], capsys: Capture
) -> None:
    cases = [Case("one", ()), Case("two", (), 2), Case("bad", ("--bad",))]
    cases = [dataclasses.replace(case, draws_weights=True) for case in cases]
    assert llama.Queue(options(tmp_path)).make(cases) == 3
    gpus = {command[command.index("--save") + 1].split("/")[-2]: g for command, g in started}
    assert sorted(gpus["two"].split(",")) == ["0", "1"] and gpus["one"] in ("0", "1")
    assert json.loads((tmp_path / "bad" / "run.json").read_text())["code"] == 3
    started.clear()
    assert llama.Queue(options(tmp_path)).make(cases) == 3
    assert len(started) == 1, "those that ended well stay"


def test_a_run_of_all_gpus_imports_while_another_trains(
    tmp_path: Path, started: list[tuple[list[str], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one does, so that runs keep their order."""
    most: list[int] = []
    pool = llama.ThreadPoolExecutor
    monkeypatch.setattr(llama, "ThreadPoolExecutor", lambda n: most.append(n) or pool(n))
    cases = [Case(name, (), 2, draws_weights=True, saves=False) for name in ("a", "b", "c")]
    assert llama.Queue(options(tmp_path)).make(cases) == 0 and most == [2]
    assert all("benchmarks.train.early_start" in command for command, _ in started)
    assert not any("--save" in command for command, _ in started)


def test_an_early_start_waits_for_its_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, waits = tmp_path / "gate", []
    monkeypatch.setenv(early_start.GATE, str(gate))
    monkeypatch.setattr(early_start.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(early_start.time, "sleep", lambda s: (waits.append(s), gate.touch()))
    monkeypatch.setenv(early_start.MODULE, llama_cases.LOST)
    monkeypatch.setattr(early_start.runpy, "run_module", lambda name, **more: waits.append(name))
    early_start.main()
    assert waits == [early_start.POLL_S, llama_cases.LOST]


def test_runs_share_gpus_up_to_their_memory(tmp_path: Path) -> None:
    """The emptiest GPUs first, and none twice for one run."""
    queue = llama.Queue(options(tmp_path, gpus=["0", "1", "2"]))
    half, pair, timed = Case("half", (), 1, 0.45), Case("pair", (), 2, 0.24), Case("timed", ())
    assert [queue._take(half) for _ in range(4)] == [["0"], ["1"], ["2"], ["0"]]
    assert queue._take(pair) == ["1", "2"] and queue._take(pair) == ["1", "2"]
    assert queue._with_room(pair) == [] and queue._with_room(timed) == []
    queue._give_back(half, ["0"])
    queue._give_back(half, ["0"])
    assert queue._with_room(timed) == ["0"]


def test_only_the_named_runs_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[tuple[list[str], str]]
) -> None:
    words = ["llama", "curves", "held_out", "--only", "held_fa3,flag_cp4", "--gpus", "0,1,2,3"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path)])
    assert llama.run_cli(llama.main) == 2, "there is no checkpoint to begin at"
    started.clear()
    save = tmp_path / "weights" / "save"
    save.mkdir(parents=True)
    (save / llama.CHECKPOINT).write_text("300")
    assert llama.run_cli(llama.main) == 0
    named = [
        command[command.index("--tensorboard-dir") + 1].split("/")[-1] for command, _ in started
    ]
    assert named == ["flag_cp4", "held_fa3"]
    loads = [command[command.index("--load") + 1] for command, _ in started if "--load" in command]
    assert loads == [str(save)] * 2


def test_too_few_gpus_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["llama", "gradients", "--out", str(tmp_path), "--gpus", "0,1"]
    )
    assert llama.run_cli(llama.main) == 2
    assert "as many GPUs as the widest run needs are required, got 2" in capsys.readouterr().err
