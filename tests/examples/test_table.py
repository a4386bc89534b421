"""The table of examples has every file, its length and its test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
IMPORTED = "init_by_name.py"
"""What examples import; it is no program."""


def test_every_example_is_in_the_table() -> None:
    page = (ROOT / "docs" / "guides/frameworks.md").read_text()
    rows = re.findall(
        r"^\| \[`(\w+\.py)`\].*?\| (\d+) \| `(.*?)` \|.*`(tests/\S+)` \|$", page, re.M
    )
    files = {
        p.name: p.read_text().splitlines()
        for p in (ROOT / "examples").glob("*.py")
        if p.name != IMPORTED
    }
    assert {name for name, *_ in rows} == set(files)
    for name, lines, command, test in rows:
        assert int(lines) == len(files[name]), f"{name} has {len(files[name])} lines"
        assert f"examples/{name}" in command
        assert (ROOT / test).exists()
