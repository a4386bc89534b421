"""What a run's gradients are judged by, and the record that holds them.

The gates were fixed before the runs, in docs/results/llama3_protocol.md:

- error: |run - truth| over stock's, in the median of parameters at most 1.05, at worst 1.25;
- share: how much of an error a run has, the projection of (run - truth) on (fp32 with the error -
  truth), each parameter over its norm: within 0.25 of stock's for a run, above 0.5 for the control.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

MEDIAN, WORST = 1.05, 1.25
SHARE_OF_A_RUN, SHARE_OF_A_CONTROL = 0.25, 0.5

Kind = Literal["stock", "run", "control"]
Row = dict[str, Any]


@dataclass
class Judged:
    """A run compared with the truth."""

    name: str
    kind: Kind
    errors: dict[str, float] = field(default_factory=dict)
    """Relative L2 error of each parameter's gradient."""
    shares: dict[str, float] = field(default_factory=dict)
    """By control."""

    def ratios(self, stock: Judged) -> np.ndarray:
        """Errors over stock's, of every parameter."""
        return np.array([self.errors[name] / stock.errors[name] for name in stock.errors])

    def failures(self, stock: Judged) -> Iterator[str]:
        """Names of the gates that it fails."""
        if self.kind == "control" and not self.shares[self.name] > SHARE_OF_A_CONTROL:
            yield "own share"
        if self.kind != "run":
            return
        ratios = self.ratios(stock)
        if not np.median(ratios) <= MEDIAN:
            yield "median"
        if not ratios.max() <= WORST:
            yield "worst"
        for name, share in self.shares.items():
            if not abs(share - stock.shares[name]) <= SHARE_OF_A_RUN:
                yield f"share of {name}"


def report(runs: Sequence[Judged]) -> tuple[list[str], bool]:
    """(a Markdown table, whether every gate holds); the first run is the yardstick."""
    stock = runs[0]
    heads = [f"share of {name}" for name in stock.shares]
    lines = [
        f"| run | error / stock's, median | worst | {' | '.join([*heads, 'verdict'])} |",
        f"|{'---|' * (4 + len(heads))}",
    ]
    for each in runs:
        ratios = each.ratios(stock)
        shares = [f"{share:+.2f}" for share in each.shares.values()]
        cells = [each.name, f"{np.median(ratios):.3f}", f"{ratios.max():.3f}", *shares]
        lines.append(f"| {' | '.join([*cells, _verdict(each, stock)])} |")
    errors = np.array([*stock.errors.values()])
    lines.append(f"stock's error: median {np.median(errors):.3%}, worst {errors.max():.3%}")
    return lines, not any(list(each.failures(stock)) for each in runs)


def _verdict(each: Judged, stock: Judged) -> str:
    failed = ", ".join(each.failures(stock))
    good = {"stock": "stock", "run": "PASS", "control": "caught"}[each.kind]
    bad = "NOT CAUGHT" if each.kind == "control" else f"FAIL {failed}"
    return bad if failed else good


def rows(weights: str, runs: Sequence[Judged]) -> list[Row]:
    """A record's rows: one for each run, with the name of its yardstick."""
    return [
        {"weights": weights, "beside": runs[0].name, "run": each.name, "kind": each.kind,
         "shares": {name: round(share, 4) for name, share in each.shares.items()},
         "errors": {name: float(f"{error:.6g}") for name, error in each.errors.items()}}
        for each in runs
    ]  # fmt: skip


def comparisons(path: Path) -> dict[tuple[str, str], list[Judged]]:
    """Runs of a record by (weights, yardstick), the yardstick first."""
    found: dict[tuple[str, str], list[Judged]] = {}
    for row in json.loads(path.read_text())["rows"]:
        each = Judged(row["run"], row["kind"], row["errors"], row["shares"])
        found.setdefault((row["weights"], row["beside"]), []).append(each)
    return found
