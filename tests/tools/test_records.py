"""Every stored record says where it comes from, and something argues with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import readme_index


@pytest.mark.parametrize("path", readme_index.entries(), ids=lambda path: path.name)
def test_a_record_has_its_facts_and_is_cited(path: Path) -> None:
    if path.is_file():
        assert readme_index.missing_in(json.loads(path.read_text())) == []
    assert readme_index.date_of(path) and readme_index.cited_in(path)


def test_what_is_missing_is_named() -> None:
    assert readme_index.missing_in({"meta": {"date": "2026-11-25", "commit": ""}}) == [
        "commit", "command", "a machine", "rows or runs",
    ]  # fmt: skip
    meta = {"date": "2026-11-25", "commit": "abc", "command": "x", "cpu": "y"}
    assert readme_index.missing_in({"meta": meta, "rows": [1]}) == []
    assert readme_index.missing_in({"meta": meta, "runs": {"stock": {}}}) == []


def test_a_citation_is_a_whole_name_or_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"a.md": {"dist_2026-11-22"}, "b.md": {"dist_2026-11-2*"}, "c.md": {"dist_2026"}}
    monkeypatch.setattr(readme_index, "_words", lambda: known)
    assert readme_index.cited_in(Path("dist_2026-11-22.json")) == ["a.md", "b.md"]
    assert readme_index.cited_in(Path("kernel_2026-11-22.json")) == []
