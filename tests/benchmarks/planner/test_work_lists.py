"""The bench of work lists runs anywhere and writes what it printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planner import work_lists


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lists.json"
    assert work_lists.main(["--tokens", "2048,4096", "--rounds", "1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert rows == [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["mask"], row["tokens"]) for row in rows] == [
        (mask, tokens) for tokens in (2048, 4096) for mask in ("packed", "causal", "random_blocks")
    ]
    for kind in ("build_ms", "forward_ms", "backward_ms", "lists_ms", "deterministic_ms"):
        assert all(row[kind] > 0 for row in rows)
    assert [row["slices"] > 1 for row in rows] == 2 * [True, False, True]
