"""Two groups of runs: equal programs hold, another one does not."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.train import two_groups
from benchmarks.train.two_groups_figure import two_groups_figure
from megatron_magi.compare.read_run import read_run
from tests.cli.command import Capture
from tests.cli.compare_runs import write_steps

STEPS = 60


def runs(tmp_path: Path, group: str, shift: float, count: int = 3) -> list[str]:
    """A common curve, noise of each run, and a shift of the group."""
    curve = 5 + np.exp(-np.arange(STEPS) / 20)
    folders = []
    for i in range(count):
        noise = np.random.default_rng([len(group), i]).normal(size=STEPS) * 1e-4
        loss = curve * (1 + noise + shift)
        write_steps(tmp_path / f"{group}{i}", [
            {"iteration": n + 1, "lm_loss": x, "grad_norm": 1.0} for n, x in enumerate(loss)
        ])  # fmt: skip
        folders.append(str(tmp_path / f"{group}{i}"))
    return folders


def judge(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, stock: list[str], magi: list[str]
) -> tuple[int, str]:
    words = ["--stock", *stock, "--magi", *magi, "--steps", "30", "60"]
    monkeypatch.setattr(sys, "argv", ["two_groups", *words])
    code = two_groups.run_cli(two_groups.main)
    out, err = capsys.readouterr()
    return code, out + err


def test_equal_programs_hold_and_a_shift_fails(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stock, magi = runs(tmp_path, "stock", 0.0), runs(tmp_path, "magi", 0.0)
    code, said = judge(capsys, monkeypatch, stock, magi)
    assert code == 0 and said.count("| holds |") == 3, said
    (line,) = [line for line in said.splitlines() if line.startswith("Distances over 60 steps")]
    assert [word[-1] for word in line.split() if word[0] == "0"] == ["%"] * 3
    shifted = runs(tmp_path, "shifted", 5e-4)
    code, said = judge(capsys, monkeypatch, stock, shifted)
    assert code == 1 and said.count("| FAILS |") == 3, said


def test_controls_are_caught_if_they_are_far(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stock, magi = runs(tmp_path, "stock", 0.0), runs(tmp_path, "magi", 0.0)
    (far,), (near,) = runs(tmp_path, "far", 5e-4, 1), runs(tmp_path, "near", 0.0, 1)
    words = ["--stock", *stock, "--magi", *magi, "--steps", "60", "--control", far, near]
    monkeypatch.setattr(sys, "argv", ["two_groups", *words])
    assert two_groups.run_cli(two_groups.main) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith(("| far", "| n"))]
    assert rows[0].endswith("| caught |") and rows[1].endswith("| not caught |"), rows


def test_figures_are_those_of_their_definitions() -> None:
    assert two_groups.t_value([1.0, 2, 3], [2.0, 3, 4]) == pytest.approx(-1 / np.sqrt(2 / 3))
    assert two_groups.T_POINTS[4] == 2.78


def test_too_few_runs_and_steps_are_one_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stock, magi = runs(tmp_path, "stock", 0.0), runs(tmp_path, "magi", 0.0)
    code, said = judge(capsys, monkeypatch, stock[:1], magi)
    assert code == 2 and "two runs or more of each program are needed, got 1 and 3" in said
    monkeypatch.setattr(sys, "argv", ["two_groups", "--stock", *stock, "--magi", *magi])
    assert two_groups.run_cli(two_groups.main) == 2
    assert "runs must have 300 steps, got fewer in " in capsys.readouterr().err


def test_figure_has_every_run_and_scales_to_those_that_are_right(tmp_path: Path) -> None:
    stock, magi, far = (
        [read_run(Path(folder)) for folder in runs(tmp_path, group, shift, count)]
        for group, shift, count in (("stock", 0.0, 2), ("magi", 0.0, 2), ("far", 0.5, 1))
    )
    losses, gaps = two_groups_figure(stock, magi, far).axes
    assert [line.get_label() for line in losses.lines] == [r.name for r in (*stock, *magi, *far)]
    low, high = gaps.get_ylim()
    *right, control = (abs(line.get_ydata()).max() for line in gaps.lines)
    assert max(right) < high == -low < control
