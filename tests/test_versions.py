"""docs/reference/versions.md claims what its records hold, and the package no other version."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"


def rows() -> list[list[str]]:
    page = (ROOT / "docs" / "reference/versions.md").read_text()
    return [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| 3.")]


def records() -> dict[str, dict[str, Any]]:
    """Meta and counts of every record, together."""
    found = {p.stem: json.loads(p.read_text()) for p in RECORDS.glob("suite_cpu_*.json")}
    return {name: record["meta"] | record["rows"][0] for name, record in found.items()}


def test_every_row_is_a_record_and_every_record_a_row() -> None:
    known = records()
    assert known and {row[6] for row in rows()} == {f"`{name}`" for name in known}
    for python, torch, core, passed, failed, skipped, name in rows():
        record = known[name.strip("`")]
        packages = record["packages"]
        assert (python, torch, core) == (
            record["python"], packages["torch"], packages["megatron-core"]
        )  # fmt: skip
        counts = record["passed"], len(record["failed"]), record["skipped"]
        assert (passed, failed, skipped) == tuple(f"{count:,}" for count in counts)
        assert record["passed"] > 5_000 and (record["exit_code"] == 0) == (failed == "0")


def test_the_oldest_claimed_versions_were_run() -> None:
    """The oldest Python by every run of scripts/test.sh, which the page says."""
    project = (ROOT / "pyproject.toml").read_text()
    limits = (ROOT / "docs" / "reference/supported.md").read_text()
    (python,) = re.findall(r'requires-python = ">=(3\.\d+)"', project)
    ((claimed, torch),) = re.findall(r"\| versions \| Python (3\.\d+)\+, torch (2\.\d+)\+", limits)
    page = (ROOT / "docs" / "reference/versions.md").read_text()
    assert claimed == python and f"which CI runs, is green on Python {python} " in page
    assert any(row[1].startswith(f"{torch}.") for row in rows())
