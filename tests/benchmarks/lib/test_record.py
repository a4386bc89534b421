"""Records of the kernel benchmark are written cell by cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.lib.record import Record, slower, write_record


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


def test_a_record_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path, meta = tmp_path / "record.json", {"command": "soak"}
    write_record(None, meta, [])
    assert not list(tmp_path.iterdir())
    for rows in ([1, 2], [3]):
        write_record(path, meta, rows, grown_mib={"process": [0.5]})
        stored = json.loads(path.read_text())
        assert stored == {"meta": meta, "grown_mib": {"process": [0.5]}, "rows": rows}
        assert list(tmp_path.iterdir()) == [path]


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


def test_head_sizes_have_cells_of_their_own(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", {"command": "", "clocks": ""})
    rows = [a_row("ours", 700.0) | {"head_dim": head_dim} for head_dim in (64, 96)]
    for row in rows:
        record.add([row])
    assert record.rows == rows
    # An older record says nothing of head_dim.
    Record(tmp_path / "old.json", {"command": "", "clocks": ""}).add([a_row("ours", 900.0)])
    assert len(slower(rows, tmp_path / "old.json")) == 2


def test_only_large_slowdowns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    Record(path, {"command": "", "clocks": ""}).add([a_row("ours", 700.0), a_row("fa3", 700.0)])
    rows = [a_row("ours", 590.0), a_row("fa3", 600.0), a_row("ffa", 1.0)]
    assert slower(rows, path) == ["slower: full 16384 fwd ours 700.0 -> 590.0"]
