"""The steps.csv of a run: a line for each iteration. No torch, no Megatron."""

from __future__ import annotations

import csv
from pathlib import Path

STEPS = "steps.csv"


def read_steps(path: Path) -> list[dict[str, str]]:
    """Lines of a steps.csv, none where there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
