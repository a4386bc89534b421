"""The table of examples has every file, and the commands name them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_example_is_in_the_table() -> None:
    page = (ROOT / "docs" / "guides/frameworks.md").read_text()
    rows = dict(re.findall(r"^\| \[`(\w+\.py)`\].*\| (`.*`|-) \|$", page, re.M))
    assert set(rows) == {path.name for path in (ROOT / "examples").glob("*.py")}
    for name, command in rows.items():
        assert command == "-" or f"examples/{name}" in command
