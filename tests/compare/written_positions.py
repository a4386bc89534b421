"""A run's positions.csv, written by hand."""

import csv
from collections.abc import Mapping
from pathlib import Path

from megatron_magi.compare.positions import POSITIONS, Bucket


def write_positions(folder: Path, losses: Mapping[Bucket, float]) -> None:
    """Mean losses, nats."""
    with (folder / POSITIONS).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["iteration", "first", "end", "loss"])
        rows.writerows([b.iteration, b.first, b.end, losses[b]] for b in sorted(losses))
