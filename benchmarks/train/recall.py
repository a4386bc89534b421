"""What runs on far keys show: whether a model that copies missed tokens that a key foretells.

    python -m benchmarks.train.recall OUT

OUT has the folders of flag_convergence.py's group `recall`. Printed for every run: the tokens that
a key foretells, how many of them were missed, their mean loss in nats, and the verdict of
docs/results/convergence_protocol.md: ours misses none, and an error shows.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.train.recall_counts import Counts, read_counts
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser

STOCK = "recall_te"
OURS = ("recall_magi_cp1", "recall_magi", "recall_right_mask")
ERRORS = ("recall_moved_by_one", "recall_first_keys", "recall_split", "recall_joined")


@dataclass(frozen=True)
class Line:
    """Of a run."""

    name: str
    counts: Counts
    verdict: str

    def __str__(self) -> str:
        counts = self.counts
        return (
            f"{self.name:<20} {counts.tokens:>9,} {counts.missed:>9,} {counts.loss:>10.2e}  "
            f"{self.verdict}"
        )


def lines(folder: Path) -> list[Line]:
    """Of every run, the stock one first."""
    counts = {name: read_counts(folder / name) for name in (STOCK, *OURS, *ERRORS)}
    whole = counts[STOCK].tokens
    return [Line(name, found, verdict(name, found, whole)) for name, found in counts.items()]


def verdict(name: str, counts: Counts, whole: int) -> str:
    """Of a run, where stock has counted so many tokens."""
    if counts.tokens != whole or not whole:
        return "NOT counted: tells nothing"
    if name in ERRORS:
        return "caught" if counts.missed else "NOT caught"
    if name == STOCK:
        return "NOT recalled: tells nothing" if counts.missed else "recalled"
    return "FAILED" if counts.missed else "pass"


def main() -> int:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, metavar="OUT", help="the folder of the runs")
    found = lines(parser.parse_args().runs)
    print(f"{'':<20} {'tokens':>9} {'missed':>9} {'loss':>10}")
    print("\n".join(map(str, found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
