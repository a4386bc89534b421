"""viz: pictures, text, and the error without matplotlib."""

import json
import sys
from itertools import groupby
from pathlib import Path

import pytest

from tests.cli.command import Capture, run


def test_viz_writes_every_picture_twice(capsys: Capture, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "viz", "--lengths", "700,300", "--cp", "3", "--out", str(tmp_path))
    assert code == 0
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {f"{n}.{f}" for n in ("shares", "mask", "traffic", "timeline")
                     for f in ("png", "svg")}  # fmt: skip
    for path in tmp_path.iterdir():
        head = path.read_bytes()[:8]
        assert head == b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else head.startswith(b"<?xml")
        assert str(path) in out
    svg = (tmp_path / "shares.svg").read_text()
    for name in ("zigzag per sequence", "zigzag per document", "megatron_magi"):
        assert f"{name}: max/mean" in svg
    assert "rank 2" in svg
    assert "of a ring's rows" in (tmp_path / "traffic.svg").read_text()


def test_viz_as_text(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, _ = run(capsys, "viz", "--lengths", "16,16", "--cp", "2", "--text")
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("zigzag per sequence: max/mean 1.0")
    assert "zigzag per document: max/mean" in lines[0] and "megatron_magi" in lines[0]
    per_sequence, per_document = zip(*(line.split()[:2] for line in lines[1:]), strict=True)
    assert per_sequence[0].startswith("0.") and per_sequence[-1].endswith("0" * 14)
    assert set("".join(per_sequence)) == set("01.")
    owners = "".join(line.replace(".", "")[0] for line in per_document)
    assert [owner for owner, _ in groupby(owners)] == list("01010")  # 0110 in each document


def test_viz_as_text_says_what_a_mask_does_not_have(capsys: Capture) -> None:
    given = ["--lengths", "64", "--window", "8", "--global-tokens", "2", "--cp", "2"]
    code, out, _ = run(capsys, "viz", *given, "--text")
    assert code == 0 and out.startswith("zigzag per document: - (only masks of packed documents")


@pytest.mark.parametrize(
    "beside", [["--out", "o"], ["--only", "mask"], ["--format", "svg"], ["--json"]]
)
def test_text_leaves_nothing_aside(capsys: Capture, beside: list[str]) -> None:
    code, out, err = run(capsys, "viz", "--lengths", "8", "--cp", "2", "--text", *beside)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"--text prints the shares and draws nothing, got {beside[0]} with it" in err


def test_equal_input_gives_equal_pictures(capsys: Capture, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(capsys, "viz", "--lengths", "300,200", "--cp", "2", "--only", "shares", "traffic",
            "--format", "svg", "--out", str(tmp_path / name), "-q")  # fmt: skip
    for name in ("shares.svg", "traffic.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_viz_of_one_rank_and_of_many(capsys: Capture, tmp_path: Path) -> None:
    for cp in ("1", "24"):
        code, out, _ = run(capsys, "viz", "--lengths", "5000", "--cp", cp, "--format", "svg",
                           "--out", str(tmp_path / cp), "--json")  # fmt: skip
        assert code == 0 and len(json.loads(out)["pictures"]) == 4


def test_viz_without_matplotlib(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run(capsys, "viz", "--lengths", "8", "--cp", "2", "--out", str(tmp_path))
    assert code == 2 and "pictures need matplotlib" in err and "megatron-magi[viz]" in err
