"""The held-out loss of a run by the position of tokens in their sample: RUN/positions.csv.

A wrong key far away changes the loss of late tokens, and a mean over all positions hides it.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from megatron_magi.compare.run_error import RunError

POSITIONS = "positions.csv"


@dataclass(frozen=True, order=True)
class Bucket:
    """Tokens of some positions in a validation."""

    iteration: int
    """After which the run was validated."""
    first: int
    """The first position."""
    end: int
    """The last position, and 1."""


def read_positions(folder: Path) -> dict[Bucket, float]:
    """Mean loss of every bucket, nats; none if the run has no such file.

    Raises:
        RunError: other columns, or what is no number.
    """
    path = folder / POSITIONS
    if not path.is_file():
        return {}
    try:
        with path.open(newline="") as file:
            return {
                Bucket(int(row["iteration"]), int(row["first"]), int(row["end"])): float(
                    row["loss"]
                )
                for row in csv.DictReader(file)
            }
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{POSITIONS} must have the columns iteration, first, end and loss, got {error!r} in "
            f"{path}; write it again, or remove it"
        ) from None
