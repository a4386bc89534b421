"""Predicted layouts: the page's table is the record's, and a row is priced as the record says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planner import layouts

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "benchmarks" / "records" / "layouts_cpu_2026-11-29.json"


def test_the_page_has_the_table_of_the_record() -> None:
    page = (ROOT / "docs" / "guides/layouts.md").read_text()
    assert "\n".join(layouts.table(json.loads(RECORD.read_text())["rows"])) in page


def test_a_row_is_repeated_by_the_program() -> None:
    rows = json.loads(RECORD.read_text())["rows"]
    (want,) = (r for r in rows if (r["distribution"], r["seq_length"], r["gpus"]) == (
        "prolong", 32768, 4))  # fmt: skip
    found = layouts.row("prolong", 32768, 4)
    assert found["recommended"] == want["recommended"]
    times = [(t["name"], t["mean"]) for t in found["layouts"]]
    assert [name for name, _ in times] == [t["name"] for t in want["layouts"]]
    assert [mean for _, mean in times] == pytest.approx([t["mean"] for t in want["layouts"]])
