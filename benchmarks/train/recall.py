"""What runs on far keys show: whether tokens are foretold from where they were seen first.

    python -m benchmarks.train.recall OUT

OUT has the folders of flag_convergence.py's group `recall`. Printed for every run: the mean loss of
repeated tokens by the distance to their first place, nats, and the verdict of
docs/convergence_protocol.md: on the same weights ours has stock's losses, and an error shows where
it has to.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.train import recall_corpus
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser, UsageError
from megatron_magi.training.parity.positions import read_positions

LEARNED = 0.3
"""Nats below which tokens are foretold; a guess has 4.2."""
SAME = 0.01
"""Nats by which two programs may differ on the same weights."""
MISSED = 1.0
"""Nats by which an error must raise the loss where it hides the answer."""
TRAINED = ("recall_te", "recall_magi")
SAME_WEIGHTS = {"recall_magi_of_te": "recall_te", "recall_te_of_magi": "recall_magi",
                "recall_right_mask": "recall_magi"}  # fmt: skip
"""Runs, and those whose last validation they repeat."""
ERRORS = {"recall_first_keys": (3,), "recall_split": (2, 3), "recall_joined": (0, 1, 2, 3)}
"""Controls, and the needles that they hide, or to which they give a second answer."""
AMBIGUOUS = 0.2
"""Nats that a second answer must cost."""

Losses = tuple[float, ...]


@dataclass(frozen=True)
class Line:
    """Of a run."""

    name: str
    losses: Losses
    """Of the needles' repeats, nearest first, nats."""
    verdict: str

    def __str__(self) -> str:
        return f"{self.name:<20} {' '.join(f'{loss:8.4f}' for loss in self.losses)}  {self.verdict}"


def read_losses(folder: Path) -> Losses:
    """Of a run's last validation."""
    found = read_positions(folder)
    if not found:
        raise UsageError(f"a validated run is needed, got none in {folder}")
    last = max(bucket.iteration for bucket in found)
    starts = [repeat.start for repeat in recall_corpus.repeats(recall_corpus.LENGTH // 2)]
    by_start = {bucket.first: loss for bucket, loss in found.items() if bucket.iteration == last}
    return tuple(by_start[start] for start in starts)


def lines(folder: Path) -> list[Line]:
    """Of every run, trained ones first."""
    losses = {name: read_losses(folder / name) for name in (*TRAINED, *SAME_WEIGHTS, *ERRORS)}
    trained = [Line(name, losses[name], learned(losses[name])) for name in TRAINED]
    same = [
        Line(name, losses[name], agreement(losses[name], losses[other]))
        for name, other in SAME_WEIGHTS.items()
    ]
    right = losses["recall_right_mask"]
    wrong = [Line(name, losses[name], caught(name, losses[name], right)) for name in ERRORS]
    return trained + same + wrong


def learned(losses: Losses) -> str:
    """Whether a run foretells tokens at every distance, or the experiment tells nothing."""
    return "learned" if max(losses) < LEARNED else "NOT learned: tells nothing"


def agreement(one: Losses, other: Losses) -> str:
    """Whether two programs have the same losses."""
    most = max(abs(x - y) for x, y in zip(one, other, strict=True))
    return f"{'pass' if most < SAME else 'FAILED'} ({most:.1e})"


def caught(name: str, losses: Losses, right: Losses) -> str:
    """Whether every needle that an error concerns has a higher loss."""
    least = AMBIGUOUS if name == "recall_joined" else MISSED
    more = [losses[needle] - right[needle] for needle in ERRORS[name]]
    return "caught" if min(more) > least else "NOT caught"


def main() -> int:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, metavar="OUT", help="the folder of the runs")
    found = lines(parser.parse_args().runs)
    repeats = recall_corpus.repeats(recall_corpus.LENGTH // 2)
    print(f"{'distance, tokens':<20} {' '.join(f'{r.distance:8,}' for r in repeats)}")
    print("\n".join(map(str, found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
