"""Losses, gradient norms and speed of runs beside a reference: PASS or FAIL, and a figure.

The first RUN is the reference. A RUN is a folder with the steps.csv that training writes.
Exit code 0: every run passes. 1: one does not. 2: they cannot be compared.

examples:
  megatron-magi compare runs/quickstart/dense runs/quickstart/magi
  megatron-magi compare runs/te runs/magi --first-step 0.02 --any-loss 0.01 --any-grad-norm 0.3
  megatron-magi compare runs/a runs/b --no-figure --quiet && echo same
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_magi.cli.parser import UsageError, add_output_options
from megatron_magi.training.compare import Comparison, Gates, compare, read_run

DEFAULT = Gates()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folders; reference first"
    )
    gates = parser.add_argument_group("thresholds, relative to the reference")
    gates.add_argument(
        "--first-step",
        type=float,
        default=DEFAULT.first_step,
        help=f"loss and gradient norm of step 1 ({DEFAULT.first_step:g})",
    )
    gates.add_argument(
        "--any-loss",
        type=float,
        default=DEFAULT.any_step_loss,
        help=f"loss of any step ({DEFAULT.any_step_loss:g})",
    )
    gates.add_argument(
        "--any-grad-norm",
        type=float,
        default=DEFAULT.any_step_grad_norm,
        help=f"gradient norm of any step ({DEFAULT.any_step_grad_norm:g})",
    )
    figure = parser.add_mutually_exclusive_group()
    figure.add_argument(
        "--out",
        type=Path,
        default=Path("magi_pictures/compare"),
        metavar="STEM",
        help="figure STEM.png and STEM.svg (default magi_pictures/compare)",
    )
    figure.add_argument("--no-figure", action="store_true", help="numbers only")
    add_output_options(parser)  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Compare, print, draw; 0 or 1."""
    if len(options.runs) < 2:
        raise UsageError(
            f"two runs or more are needed, the reference first, got only {options.runs[0]}; "
            f"name another"
        )
    gates = Gates(options.first_step, options.any_loss, options.any_grad_norm)
    try:
        runs = [read_run(folder) for folder in options.runs]
        comparisons = [compare(run, runs[0], gates) for run in runs]
    except ValueError as error:
        raise UsageError(str(error)) from error
    figure = [] if options.no_figure else _figure(comparisons, options)
    passed = all(c.passed for c in comparisons)
    if options.json:
        print(json.dumps(_facts(comparisons, passed, figure), indent=1))
    elif options.quiet:
        print("\n".join(f"{_word(c)} {c.run.name}" for c in comparisons[1:]))
    else:
        print("\n".join([*_table(comparisons), *(f"wrote {path}" for path in figure)]))
    return 0 if passed else 1


def _table(comparisons: list[Comparison]) -> list[str]:
    width = max(9, *(len(c.run.name) for c in comparisons)) + 1
    head = (f"{'run':<{width}}{'steps':>6}{'first loss':>12}{'last loss':>12}{'grad norm 1':>13}"
            f"{'tokens/s':>11}{'step 1':>10}{'loss':>10}{'grad norm':>11}  verdict")  # fmt: skip
    lines = [head, "-" * len(head)]
    speed = _speed(comparisons[0])
    for c in comparisons:
        r, is_reference = c.run, c is comparisons[0]
        differences = (c.first_step, c.loss_difference.max(), c.grad_norm_difference.max())
        shown = ["-"] * 3 if is_reference else [f"{d:.1e}" for d in differences]
        ratio = "" if is_reference or not speed else f" ({_speed(c) / speed:.2f}x)"
        lines.append(
            f"{r.name:<{width}}{len(r.loss):>6}{r.loss[0]:>12.6f}{r.loss[-1]:>12.6f}"
            f"{r.grad_norm[0]:>13.6f}{_speed(c):>11,.0f}{shown[0]:>10}{shown[1]:>10}{shown[2]:>11}"
            f"  {'reference' if is_reference else _word(c)}{ratio}"
        )
    g = comparisons[0].gates
    lines.append(
        f"{'thresholds':<{width}}{'':>54}{g.first_step:>10.0e}{g.any_step_loss:>10.0e}"
        f"{g.any_step_grad_norm:>11.0e}"
    )
    return lines


def _facts(comparisons: list[Comparison], passed: bool, figure: list[str]) -> dict[str, Any]:
    gates = comparisons[0].gates
    return {
        "passed": passed,
        "reference": comparisons[0].run.name,
        "thresholds": vars(gates),
        "figure": figure,
        "runs": [
            {
                "name": c.run.name,
                "steps": len(c.run.loss),
                "first_loss": float(c.run.loss[0]),
                "last_loss": float(c.run.loss[-1]),
                "tokens_per_second": _speed(c),
                "first_step_difference": c.first_step,
                "worst_loss_difference": float(c.loss_difference.max()),
                "worst_grad_norm_difference": float(c.grad_norm_difference.max()),
                "passed": c.passed,
            }
            for c in comparisons
        ],
    }


def _figure(comparisons: list[Comparison], options: argparse.Namespace) -> list[str]:
    try:
        from megatron_magi.viz.curves_figure import curves_figure
        from megatron_magi.viz.style import save

        drawn = curves_figure(comparisons)
    except ImportError as error:
        if not (options.quiet or options.json):
            print(f"no figure: {error}")
        return []
    return [str(path) for path in save(drawn, options.out, ("png", "svg"))]


def _speed(comparison: Comparison) -> float:
    """Median tokens/s, the first step left out because it warms up."""
    speeds = comparison.run.tokens_per_second
    return float(np.median(speeds[1:] if len(speeds) > 1 else speeds))


def _word(comparison: Comparison) -> str:
    return "PASS" if comparison.passed else "FAIL"
