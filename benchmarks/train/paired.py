"""What the paired runs of flag_convergence.py show: mean differences of held-out losses.

    python -m benchmarks.train.paired OUT

OUT has folders paired_KIND_SEED. Runs of one seed begin with the same weights and read the same
samples, so the difference of two of them is that of their programs and of chance: rounding that
grows from step to step. Over many seeds chance averages out. Printed for every kind, in nats: the
mean of its held-out loss minus that of another kind with the same seed, its standard error, the
interval that has the true mean in 95 of 100 such experiments (Student's t), and the verdict of
docs/convergence_protocol.md, whose margin is what an error on purpose does. Seeds that lack a kind
are left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser, UsageError
from megatron_magi.compare.positions import Bucket, read_positions

JUDGED = {"te_a2a": "te", "magi": "te", "right_mask": "te"}
"""Kinds, and the kind that each is compared with."""
CONTROL, RIGHT = "near_block", "right_mask"
KINDS = ("te", *JUDGED, CONTROL)
FEWEST_PAIRS = 4
"""Seeds of an experiment."""
T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
"""Student's t for 95 %, of 1, 2, ... degrees of freedom."""

Losses = dict[Bucket, float]


@dataclass(frozen=True)
class Difference:
    """Of a kind of runs from another one with the same seeds, nats."""

    mean: float
    error: float
    """The standard error of the mean."""
    num_pairs: int

    @property
    def interval(self) -> float:
        """Half the width of the interval of 95 %."""
        return T_95[min(self.num_pairs - 1, len(T_95)) - 1] * self.error

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.interval

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.interval

    def verdict(self, margin: float) -> str:
        """Whether the programs are the same up to this margin, nats; none at 0 or below."""
        if margin <= 0:
            return "tells nothing"
        if -margin < self.low and self.high < margin:
            return "pass"
        return "FAILED" if self.low > 0 or self.high < 0 else "tells nothing"

    def __str__(self) -> str:
        return (
            f"{self.mean:+.5f} +- {self.error:.5f}, interval {self.low:+.5f} to {self.high:+.5f}, "
            f"{self.num_pairs} pairs"
        )


def difference(kind: dict[int, float], other: dict[int, float]) -> Difference:
    """Of held-out losses by seed, which both have: the first minus the second."""
    pairs = [kind[seed] - other[seed] for seed in sorted(other)]
    error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    return Difference(statistics.fmean(pairs), error, len(pairs))


def read_runs(folder: Path) -> dict[str, dict[int, Losses]]:
    """Held-out losses by kind and seed, of seeds whose runs of all kinds were validated."""
    runs: dict[str, dict[int, Losses]] = {kind: {} for kind in KINDS}
    for run in sorted(folder.glob("paired_*_*")):
        kind, seed = run.name.removeprefix("paired_").rsplit("_", 1)
        if kind in runs and (losses := read_positions(run)):
            runs[kind][int(seed)] = losses
    whole = set.intersection(*(set(of_seed) for of_seed in runs.values()))
    if len(whole) < FEWEST_PAIRS:
        raise UsageError(
            f"{FEWEST_PAIRS} seeds with runs of {', '.join(KINDS)} are needed in {folder}, got "
            f"{len(whole)}"
        )
    return {kind: {seed: of_seed[seed] for seed in whole} for kind, of_seed in runs.items()}


def weighted_mean(losses: Losses) -> float:
    """Over all positions: every sample has a token at each."""
    sizes = {bucket: bucket.end - bucket.first for bucket in losses}
    return sum(sizes[b] * loss for b, loss in losses.items()) / sum(sizes.values())


def means(of_seed: dict[int, Losses]) -> dict[int, float]:
    """Losses over all positions by seed."""
    return {seed: weighted_mean(losses) for seed, losses in of_seed.items()}


def report(folder: Path) -> list[str]:
    """A line for every kind, and one for each of its buckets of positions."""
    runs = read_runs(folder)
    error = difference(means(runs[CONTROL]), means(runs[RIGHT]))
    caught = "caught" if error.low > 0 else "NOT caught"
    lines = [f"{CONTROL:<12} - {RIGHT:<12} all positions   {error}: {caught}"]
    for kind, other in JUDGED.items():
        whole = difference(means(runs[kind]), means(runs[other]))
        lines.append(
            f"{kind:<12} - {other:<12} all positions   {whole}: {whole.verdict(error.low)}"
        )
    for kind, other in {CONTROL: RIGHT, **JUDGED}.items():
        lines += at_positions(kind, runs[kind], runs[other])
    return lines


def at_positions(kind: str, one: dict[int, Losses], other: dict[int, Losses]) -> list[str]:
    """What judges nothing: a line for every bucket of positions."""
    lines = []
    for bucket in sorted(next(iter(one.values()))):
        at = difference(
            {seed: losses[bucket] for seed, losses in one.items()},
            {seed: losses[bucket] for seed, losses in other.items()},
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
