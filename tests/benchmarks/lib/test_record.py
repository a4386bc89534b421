"""Records of the kernel benchmark are written cell by cell, and the README's tables read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.record import Record, slower
from tools import readme_kernel, readme_records


def a_row(impl: str, tflops: float, mask: str = "full", direction: str = "fwd") -> dict[str, Any]:
    return {
        "mask": mask, "seqlen": 16384, "direction": direction, "impl": impl, "tflops": tflops,
        "ms": 1.0, "min_ms": 1.0, "max_ms": 1.0, "n": 3,
    }  # fmt: skip


def test_a_killed_run_leaves_its_cells(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = Record(path, {"command": "first", "clocks": "cold"})
    record.add([a_row("ours", 700.0)])
    stored = json.loads(path.read_text())
    assert stored["meta"]["command"] == "first" and stored["rows"] == [a_row("ours", 700.0)]
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_append_keeps_other_cells_and_both_commands(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    first = Record(path, {"command": "first", "clocks": ""})
    first.add([a_row("ours", 700.0), a_row("cudnn", 600.0)])
    first.add([a_row("ours", 500.0, direction="bwd")])
    second = Record(path, {"command": "second", "clocks": ""}, append=True)
    second.add([a_row("ours", 710.0)])
    second.finish({"clocks": "warm"})
    stored = json.loads(path.read_text())
    assert stored["meta"] == {"command": ["first", "second"], "clocks": "warm"}
    assert stored["rows"] == [a_row("ours", 500.0, direction="bwd"), a_row("ours", 710.0)]


def test_only_large_slowdowns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    Record(path, {"command": "", "clocks": "", "level": "op"}).add(
        [a_row("ours", 700.0), a_row("fa3", 700.0)]
    )
    rows = [a_row("ours", 590.0), a_row("fa3", 600.0), a_row("ffa", 1.0)]
    assert slower(rows, path, "op") == ["slower: full 16384 fwd ours 700.0 -> 590.0"]
    (line,) = slower(rows, path, "autograd")
    assert line.startswith("not compared") and "taken at op, this run at autograd" in line


@pytest.mark.parametrize("before", [{}, {"level": "op"}])
def test_a_record_keeps_one_level(tmp_path: Path, before: dict[str, str]) -> None:
    path = tmp_path / "record.json"
    Record(path, {"command": "", "clocks": "", **before}).add([a_row("ours", 700.0)])
    now = {"command": "", "clocks": "", "level": "autograd"}
    with pytest.raises(SystemExit, match="a record has one level, got"):
        Record(path, now, append=True)
    assert Record(path, now).rows == []  # a new record in its place is none of its business


def test_tables_say_the_level(stored: Path) -> None:
    for level, says in ((None, "Not all were timed at one level"),
                        ("op", "below autograd, in random"),
                        ("autograd", "All implementations ran through autograd")):  # fmt: skip
        for path in stored.iterdir():
            record = json.loads(path.read_text())
            record["meta"] |= {"level": level} if level else {}
            path.write_text(json.dumps(record))
        assert says in readme_kernel.kernel_summary()


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two records: the newer one has peers and a backward for one of the masks."""
    monkeypatch.setattr(readme_records, "RECORDS", tmp_path)
    monkeypatch.setattr(readme_records, "ROOT", tmp_path)
    old = [a_row("ours", 700.0), a_row("cudnn", 600.0), a_row("ours", 500.0, mask="causal")]
    new = [a_row("ours", 720.0), a_row("cudnn", 610.0), a_row("fa3", 680.0)]
    new += [a_row("ours", 550.0, direction="bwd"), a_row("flex", 300.0, direction="bwd")]
    for date, rows in (("2026-01-01", old), ("2026-01-02", new)):
        text = json.dumps({"meta": {"gpu": date}, "rows": rows})
        (tmp_path / f"kernel_h200_{date}.json").write_text(text)
    return tmp_path


def test_tables_show_the_peers_of_the_newest_record_of_each_cell(stored: Path) -> None:
    peers = readme_kernel.kernel_peers().splitlines()
    assert peers[0] == "| mask, 16k | magi | cudnn | flex | fa3 |"
    assert peers[2] == "| `full` | 720 / 550 | 610 / - | - / 300 | 680 / - |"
    assert peers[3] == "| `causal` | 500 / - | - | - | - |"
    summary = readme_kernel.kernel_summary()
    assert summary.count("Record:") == 2
    assert "| `full` | - | 720 (1.06x fa3) | - | - | 550 (1.83x) | - |" in summary


def test_no_record_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme_records, "RECORDS", tmp_path)
    assert readme_kernel.kernel_summary() == readme_kernel.NO_KERNEL_RECORD
    assert readme_records.newest("kernel") is None
