"""compare: its figure, and the verdict without one."""

import sys
from pathlib import Path

import pytest

from tests.cli.command import Capture, run
from tests.cli.compare_runs import ODD, Write, write_run


def test_a_figure_that_cannot_be_written_is_one_sentence(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws the figure")
    first, second = (write_run(tmp_path / name, 0) for name in "ab")
    (tmp_path / "file").touch()
    code, _, err = run(capsys, "compare", first, second, "--out", str(tmp_path / "file" / "x"))
    assert code == 2 and err.count("\n") == 1 and "pass another --out or --no-figure" in err


def test_the_figure_names_every_run(
    capsys: Capture, family: tuple[str, str], write: Write, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    right = write("magi_cp2", ODD, gradients=0.0)
    control = write("moved", ODD + 0.01, gradients=0.3, steps=60)
    stem = tmp_path / "pictures" / "noise"
    code, out, _ = run(capsys, "compare", family[0], str(right), "--noise", family[1],
                       "--expect-fail", str(control), "--allow-shorter", "--loss-drop", "4.9",
                       "--out", str(stem))  # fmt: skip
    assert code == 0 and f"wrote {stem}.png" in out
    svg = stem.with_suffix(".svg").read_text()
    for text in ("plain (baseline)", "magi_cp2", "moved", "|noise|", "nats per token", "step"):
        assert text in svg, text


def test_without_matplotlib_the_verdict_stands(
    capsys: Capture,
    family: tuple[str, str],
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    right = write("magi", ODD, gradients=0.0)
    code, out, _ = run(capsys, "compare", family[0], str(right), "--noise", family[1],
                       "--loss-drop", "4.9")  # fmt: skip
    assert code == 0 and "no figure: pictures need matplotlib" in out
