"""Every stored record says where it comes from, and something argues with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import record_index
from tools.readme_records import Record

REQUIRED = ("date", "commit", "command")
"""What every record's meta has, and one of the keys that name a machine."""


def missing_in(record: Record) -> list[str]:
    """What a record ought to have and has not."""
    meta = record.get("meta") or {}
    missing = [name for name in REQUIRED if not meta.get(name)]
    if not any(meta.get(name) for name in record_index.MACHINES):
        missing.append("a machine")
    has_content = record.get("rows") or record.get("runs")
    return missing if has_content else [*missing, "rows or runs"]


@pytest.mark.parametrize("path", record_index.entries(), ids=lambda path: path.name)
def test_a_record_has_its_facts_and_is_cited(path: Path) -> None:
    if path.is_file():
        assert missing_in(json.loads(path.read_text())) == []
    assert record_index.date_of(path) and record_index.cited_in(path)


def test_what_is_missing_is_named() -> None:
    assert missing_in({"meta": {"date": "2026-11-25", "commit": ""}}) == [
        "commit", "command", "a machine", "rows or runs",
    ]  # fmt: skip
    meta = {"date": "2026-11-25", "commit": "abc", "command": "x", "cpu": "y"}
    assert missing_in({"meta": meta, "rows": [1]}) == []
    assert missing_in({"meta": meta, "runs": {"stock": {}}}) == []


def test_a_citation_is_a_whole_name_or_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"a.md": {"dist_2026-11-22"}, "b.md": {"dist_2026-11-2*"}, "c.md": {"dist_2026"}}
    monkeypatch.setattr(record_index, "_words", lambda: known)
    assert record_index.cited_in(Path("dist_2026-11-22.json")) == ["a.md", "b.md"]
    assert record_index.cited_in(Path("kernel_2026-11-22.json")) == []
