"""How far training runs are from each other: every pair of them, over the steps that all have.

    python -m benchmarks.train.distances RUN RUN ...

Printed for each pair: the mean of absolute differences and the signed mean, in percent of the mean
of the two losses of a step, and the difference of the means of the last 50 steps, nats. Where two
runs of one program are as far apart as runs of two programs, distances say nothing of programs.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from megatron_magi.compare.read_run import read_run

LAST = 50


@dataclass(frozen=True)
class Distance:
    """Of two curves of losses."""

    absolute: float
    """The mean of absolute differences, each over the mean of the two losses, %."""
    signed: float
    """The same with its sign: positive where the second run's losses are higher."""
    last: float
    """The second run's mean over the last 50 steps minus the first one's, nats."""

    def __str__(self) -> str:
        return f"{self.absolute:.3f} %  {self.signed:+.3f} %  {self.last:+.4f}"


def distance(one: npt.NDArray[np.float64], two: npt.NDArray[np.float64]) -> Distance:
    """Of losses of the same steps."""
    relative = 100 * (two - one) / ((one + two) / 2)
    last = float(two[-LAST:].mean() - one[-LAST:].mean())
    return Distance(float(abs(relative).mean()), float(relative.mean()), last)


def report(folders: list[Path]) -> list[str]:
    """A line for every pair of runs."""
    losses = {folder.name: read_run(folder).loss for folder in folders}
    steps = min(len(loss) for loss in losses.values())
    width = max(len(name) for name in losses)
    return [
        f"{one:<{width}} {two:<{width}} {distance(losses[one][:steps], losses[two][:steps])}"
        for one, two in itertools.combinations(losses, 2)
    ] + [f"{steps} steps"]


def main() -> int:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders with a steps.csv")
    print("\n".join(report(parser.parse_args().runs)))
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
