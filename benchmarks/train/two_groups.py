"""Runs of two programs as two groups: are runs of different programs further apart than equal ones?

    python -m benchmarks.train.two_groups --stock A B C --magi D E F [--steps 100 300] \\
        [--control G ...]

A run is a folder that `megatron-magi compare` reads. Fixed before the runs:

- E at each step given: the mean distance of a stock run and a magi run, over the mean distance of
  two runs of one group; a distance is the median over steps of |relative loss difference|. At most
  1.5.
- t of the groups' mean losses, and of their held-out losses where every run has them, with pooled
  variance. At most the two-sided 5 % point: 2.78 for 3 + 3 runs.

Exit code 0: all hold. Controls are runs with an error, of as many steps as they have; a table says
which of them the curves show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path

import numpy as np

from benchmarks.lib.options import at_least
from benchmarks.train.two_groups_figure import two_groups_figure
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser, UsageError
from megatron_magi.compare.differences import Curve, RunCurves
from megatron_magi.compare.read_run import read_run
from megatron_magi.compare.run_error import RunError
from megatron_magi.viz.style import save

MOST_E = 1.5
T_POINTS = {2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31}
"""Two-sided 5 % points of Student's t by degrees of freedom."""


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stock", type=Path, nargs="+", required=True)
    parser.add_argument("--magi", type=Path, nargs="+", required=True)
    parser.add_argument("--control", type=Path, nargs="+", default=[], help="runs with an error")
    parser.add_argument("--figure", type=Path, metavar="PATH.png", help="draw all runs")
    parser.add_argument("--steps", type=at_least(1), nargs="+", default=[100, 300])
    options = parser.parse_args()
    try:
        stock, magi, controls = (
            [*map(read_run, group)] for group in (options.stock, options.magi, options.control)
        )
    except (RunError, ValueError) as error:
        raise UsageError(str(error)) from error
    _check(stock, magi, max(options.steps))
    if options.figure:
        figure = two_groups_figure(stock, magi, controls)
        save(figure, options.figure.with_suffix(""), (options.figure.suffix[1:] or "png",))
    lines, holds = report(stock, magi, options.steps)
    lines.append(distances(stock, magi, max(options.steps)))
    print("\n".join([*lines, *seen(controls, stock, [*stock, *magi])]))
    return 0 if holds else 1


def report(
    stock: Sequence[RunCurves], magi: Sequence[RunCurves], steps: Sequence[int]
) -> tuple[list[str], bool]:
    """(a Markdown table, whether every figure holds)."""
    limit = T_POINTS[min(8, len(stock) + len(magi) - 2)]
    found = [(f"E at {n} steps", excess(stock, magi, n), MOST_E) for n in steps]
    last = max(steps)
    means = ([float(r.loss[:last].mean()) for r in group] for group in (stock, magi))
    found.append((f"t of mean losses, {last} steps", abs(t_value(*means)), limit))
    if all(run.validation for run in (*stock, *magi)):
        held = ([run.validation[max(run.validation)] for run in group] for group in (stock, magi))
        found.append(("t of held-out losses", abs(t_value(*held)), limit))
    lines = ["| figure | value | limit | |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {value:.2f} | {most:.2f} | {'holds' if value <= most else 'FAILS'} |"
        for name, value, most in found
    ]
    return lines, all(value <= most for _, value, most in found)


def seen(
    controls: Sequence[RunCurves], stock: Sequence[RunCurves], right: Sequence[RunCurves]
) -> list[str]:
    """A Markdown table: which errors curves of that many steps show; nothing is judged by it."""
    if not controls:
        return []
    limit = T_POINTS[min(8, len(right) - 1)]
    lines = ["", f"| control | steps | t (limit {limit:.2f}) | distance over stock's | |",
             "|---|---|---|---|---|"]  # fmt: skip
    for control in controls:
        n = len(control.loss)
        means = [[float(run.loss[:n].mean()) for run in runs] for runs in ([control], right)]
        t = abs(t_value(*means))
        apart = np.mean([distance(control, run, n) for run in right])
        inside = np.mean([distance(a, b, n) for a, b in combinations(stock, 2)])
        verdict = "caught" if t > limit else "not caught"
        lines.append(f"| {control.name} | {n} | {t:.1f} | {apart / inside:.1f} | {verdict} |")
    return lines


def distances(stock: Sequence[RunCurves], magi: Sequence[RunCurves], steps: int) -> str:
    """Mean distances between the groups and inside each, in one line."""
    pairs = {
        "between the groups": product(stock, magi),
        "within stock": combinations(stock, 2),
        "within magi": combinations(magi, 2),
    }
    means = {name: np.mean([distance(a, b, steps) for a, b in two]) for name, two in pairs.items()}
    figures = ", ".join(f"{mean:.4%} {name}" for name, mean in means.items())
    return f"Distances over {steps} steps: {figures}."


def excess(stock: Sequence[RunCurves], magi: Sequence[RunCurves], steps: int) -> float:
    """E: distances between the groups over those inside them."""
    between = [distance(a, b, steps) for a, b in product(stock, magi)]
    inside = [distance(a, b, steps) for g in (stock, magi) for a, b in combinations(g, 2)]
    return float(np.mean(between) / np.mean(inside))


def distance(a: RunCurves, b: RunCurves, steps: int) -> float:
    """Median over the first steps of the absolute relative difference of two losses."""
    first, second = (run.loss[:steps] for run in (a, b))
    difference: Curve = np.abs(first - second) / ((first + second) / 2)
    return float(np.median(difference))


def t_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Student's t of two groups, with pooled variance."""
    n, m = len(first), len(second)
    squares = sum(float(np.var(x)) * len(x) for x in (first, second))
    deviation = math.sqrt(squares / (n + m - 2) * (1 / n + 1 / m))
    return (float(np.mean(first)) - float(np.mean(second))) / deviation


def _check(stock: Sequence[RunCurves], magi: Sequence[RunCurves], steps: int) -> None:
    if min(len(stock), len(magi)) < 2:
        raise UsageError(
            f"two runs or more of each program are needed, got {len(stock)} and {len(magi)}; train "
            f"more"
        )
    short = [run.name for run in (*stock, *magi) if len(run.loss) < steps]
    if short:
        raise UsageError(f"runs must have {steps} steps, got fewer in {short}; pass fewer --steps")


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
