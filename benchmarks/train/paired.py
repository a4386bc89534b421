"""What the paired runs of flag_convergence.py show: mean differences of held-out losses.

    python -m benchmarks.train.paired OUT

OUT has folders paired_KIND_SEED. Runs of one seed begin with the same weights and read the same
samples, so the difference of two of them is that of their programs and of chance: rounding that
grows from step to step. Over many seeds chance averages out. Printed for every kind, in nats: the
mean of its held-out loss minus that of `te` with the same seed, its standard error, the interval
that has the true mean in 95 of 100 such experiments (Student's t), and the verdict of
docs/convergence_protocol.md. Seeds that lack a kind are left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser, UsageError
from megatron_magi.training.parity.positions import Bucket, read_positions

STOCK, CONTROLS = "te", ("near_tile", "near_block")
FEWEST_PAIRS, WIDEST = 4, 0.01
"""Seeds of an experiment, and nats on either side of a mean that still tell something."""
T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
"""Student's t for 95 %, of 1, 2, ... degrees of freedom."""

Losses = dict[Bucket, float]


@dataclass(frozen=True)
class Difference:
    """Of a kind of runs from stock ones with the same seeds, nats."""

    mean: float
    error: float
    """The standard error of the mean."""
    num_pairs: int

    @property
    def interval(self) -> float:
        """Half the width of the interval of 95 %."""
        return T_95[min(self.num_pairs - 1, len(T_95)) - 1] * self.error

    @property
    def differs(self) -> bool:
        """Whether 0 lies outside of the interval."""
        return abs(self.mean) > self.interval

    def verdict(self, kind: str) -> str:
        """That of the protocol on runs of this kind."""
        if kind in CONTROLS:
            return "caught" if self.differs else "NOT caught"
        if self.differs:
            return "FAILED"
        return "pass" if self.interval < WIDEST else "tells nothing"

    def __str__(self) -> str:
        return (
            f"{self.mean:+.5f} +- {self.error:.5f}, interval {self.mean - self.interval:+.5f} to "
            f"{self.mean + self.interval:+.5f}, {self.num_pairs} pairs"
        )


def difference(kind: dict[int, float], stock: dict[int, float]) -> Difference:
    """Of held-out losses by seed, which both have."""
    pairs = [kind[seed] - stock[seed] for seed in sorted(stock)]
    error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    return Difference(statistics.fmean(pairs), error, len(pairs))


def read_runs(folder: Path) -> dict[str, dict[int, Losses]]:
    """Held-out losses by kind and seed, of runs that were validated."""
    runs: dict[str, dict[int, Losses]] = defaultdict(dict)
    for run in sorted(folder.glob("paired_*_*")):
        kind, seed = run.name.removeprefix("paired_").rsplit("_", 1)
        if losses := read_positions(run):
            runs[kind][int(seed)] = losses
    if not runs.get(STOCK):
        raise UsageError(f"runs named paired_{STOCK}_SEED are needed, got none in {folder}")
    whole = set.intersection(*(set(of_seed) for of_seed in runs.values()))
    if len(whole) < FEWEST_PAIRS:
        raise UsageError(f"{FEWEST_PAIRS} seeds with all kinds are needed, got {len(whole)}")
    return {kind: {seed: of_seed[seed] for seed in whole} for kind, of_seed in runs.items()}


def weighted_mean(losses: Losses) -> float:
    """Over all positions: every sample has a token at each."""
    sizes = {bucket: bucket.end - bucket.first for bucket in losses}
    return sum(sizes[b] * loss for b, loss in losses.items()) / sum(sizes.values())


def report(folder: Path) -> list[str]:
    """Lines for every kind but the stock one: over all positions, and over those of each bucket."""
    runs = read_runs(folder)
    stock = runs.pop(STOCK)
    lines = []
    for kind, of_seed in runs.items():
        whole = difference(
            {seed: weighted_mean(losses) for seed, losses in of_seed.items()},
            {seed: weighted_mean(losses) for seed, losses in stock.items()},
        )
        lines.append(f"{kind:<12} all positions   {whole}: {whole.verdict(kind)}")
        for bucket in sorted(next(iter(stock.values()))):
            at = difference(
                {seed: losses[bucket] for seed, losses in of_seed.items()},
                {seed: losses[bucket] for seed, losses in stock.items()},
            )
            lines.append(f"{kind:<12} {bucket.first:>6} to {bucket.end:<6} {at}")
    return lines


def main() -> int:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, metavar="OUT", help="the folder of the runs")
    print("\n".join(report(parser.parse_args().runs)))
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
