"""Losses, gradients and speed of runs against a baseline: PASS or FAIL, and a figure.

The first RUN is the baseline. A RUN is a folder with what Megatron wrote with --tensorboard-dir,
and the wgrads of --save-wgrads-interval if gradients are compared; or with a steps.csv. It may
also be FILE.json/NAME, a run in the JSON file of an experiment.
Without --noise, differences are held to fixed thresholds, made for fp32. With --noise they are held
to the effect of rounding alone: NOISE is the baseline trained again with another kernel of the same
precision, or with a step's samples in another order. With --mean-of, the baseline is the mean of
these runs, and the noise is each of them against the mean of the others.
docs/guides/compare_runs.md describes each gate.
Exit code 0: every run passes and every control fails. 1: not so. 2: they cannot be compared.

examples:
  megatron-magi compare runs/quickstart/dense runs/quickstart/magi
  megatron-magi compare runs/te runs/magi --first-step 0.02 --any-loss 0.01 --any-grad-norm 0.3
  megatron-magi compare runs/plain runs/magi_cp2 --noise runs/plain_reversed
  megatron-magi compare runs/plain runs/magi --noise runs/plain_reversed --allow-shorter \\
      --expect-fail runs/moved_boundary --expect-fail runs/dropped_tile
  megatron-magi compare runs/magi --mean-of runs/p2p --mean-of runs/a2a --mean-of runs/all_gather
  megatron-magi compare runs/a runs/b --no-figure --quiet && echo same
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_magi.cli.compare_report import NoiseReport, PlainReport
from megatron_magi.cli.parser import UsageError, add_output_options
from megatron_magi.compare.differences import Comparison, Gates, RunCurves, compare
from megatron_magi.compare.evidence import read_evidence
from megatron_magi.compare.gradient_errors import Baseline, gradient_errors
from megatron_magi.compare.mean_floor import read_mean_floor
from megatron_magi.compare.noise_floor import NoiseGates, read_noise_floor
from megatron_magi.compare.noise_gates import Judged, judge
from megatron_magi.compare.read_run import read_run

PLAIN = {
    "first_step": ("first_step", "loss and gradient norm of step 1"),
    "any_step_loss": ("any_loss", "loss of any step"),
    "any_step_grad_norm": ("any_grad_norm", "gradient norm of any step"),
    "gradient": ("any_gradient", "gradient of any parameter, at the first step that saved them"),
}
NOISE = {
    "step_1_loss": "relative loss difference at step 1",
    "gradient_ratio": "error of every parameter's gradient, times the noise run's",
    "gradient_floor": "noise of a gradient is at least this",
    "mean_loss": "mean of |relative loss difference|",
    "noise_ratio": "means and validation, times the noise run's scale",
    "last_steps": "steps at the end whose mean is compared",
    "every_validation": "judge every validation, not the last alone, as if the runs ended with it",
    "loss_start": "nats between the first loss and an untrained model's",
    "loss_drop": "nats by which the loss falls",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN",
        help="folders, or FILE.json/NAME; baseline first"
    )  # fmt: skip
    parser.add_argument(
        "--noise", action="append", type=Path, metavar="NOISE",
        help="a noise run's folder; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--mean-of", action="append", type=Path, metavar="RUN",
        help="a run of the baseline, which is the mean of all that are given so",
    )  # fmt: skip
    parser.add_argument(
        "--expect-fail", action="append", default=[], type=Path, metavar="CONTROL",
        help="a run that must fail; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--allow-shorter",
        action="store_true",
        help="compare a run that is shorter than the baseline over the steps of both",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="compare over these first steps alone, as a short control is",
    )
    _add_gates(parser)
    figure = parser.add_mutually_exclusive_group()
    figure.add_argument(
        "--out",
        type=Path,
        default=Path("magi_pictures/compare"),
        metavar="STEM",
        help="figure STEM.png and STEM.svg (default magi_pictures/compare)",
    )
    figure.add_argument("--no-figure", action="store_true", help="numbers only")
    add_output_options(parser)


def _add_gates(parser: argparse.ArgumentParser) -> None:
    plain = parser.add_argument_group("thresholds without these, relative to the baseline")
    for field, (name, text) in PLAIN.items():
        default = getattr(Gates(), field)
        plain.add_argument(_option(name), type=_threshold, dest=name, help=f"{text} ({default:g})")
    noise = parser.add_argument_group("thresholds with --noise or --mean-of")
    for name, text in NOISE.items():
        default = getattr(NoiseGates(), name)
        if default is False:
            noise.add_argument(_option(name), action="store_true", default=None, help=text)
            continue
        shown = "one rounding step" if default is None else f"{default:g}"
        kind = int if name == "last_steps" else _threshold
        noise.add_argument(_option(name), type=kind, dest=name, help=f"{text} ({shown})")


def run(options: argparse.Namespace) -> int:
    """Compare, print, draw; 0 or 1."""
    _require_runs(options)
    _refuse_other_gates(options)
    try:
        report = _with_noise(options) if _measures_noise(options) else _plain(options)
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        figure = [] if options.no_figure else _figure(report, options)
    except OSError as error:
        raise UsageError(
            f"the figure needs a place that can be written, got {error}; pass another --out or "
            f"--no-figure"
        ) from error
    if options.json:
        print(json.dumps({**report.facts(), "figure": figure}, indent=1))
    elif options.quiet:
        print("\n".join(report.verdicts()))
    else:
        print("\n".join([*report.table(), *(f"wrote {path}" for path in figure)]))
    return 0 if report.passed else 1


def _measures_noise(options: argparse.Namespace) -> bool:
    return options.noise is not None or options.mean_of is not None


def _require_runs(options: argparse.Namespace) -> None:
    """Raise UsageError for too few runs, or a run that is both judged and judges."""
    if options.mean_of is None and len(options.runs) + len(options.expect_fail) < 2:
        raise UsageError(
            f"two runs or more are needed, the baseline first, got only {options.runs[0]}; "
            f"name another"
        )
    if options.steps is not None and options.steps < 1:
        raise UsageError(f"--steps must be at least 1, got {options.steps}; pass a number of steps")
    if options.mean_of is not None and options.noise is not None:
        raise UsageError(
            "--noise has no effect with --mean-of, whose runs measure the noise too, got both; "
            "leave one of them out"
        )


def _require_steps(runs: Sequence[RunCurves], options: argparse.Namespace) -> None:
    """Raise UsageError for runs that end before --steps; a shorter baseline is refused later."""
    for run in runs:
        if len(run.loss) < options.steps and not options.allow_shorter:
            raise UsageError(
                f"runs to compare must have the {options.steps} iterations of --steps, got "
                f"{len(run.loss)} of {run.name}; pass a smaller number, or --allow-shorter"
            )


def _plain(options: argparse.Namespace) -> PlainReport:
    gates = Gates(**_given(options, {f: name for f, (name, _) in PLAIN.items()}))
    baseline = read_run(options.runs[0])

    def compared(folder: Path) -> Comparison:
        run, shorter = read_run(folder), options.allow_shorter
        if options.steps is not None:
            _require_steps([run], options)
            run, shorter = run.first(options.steps), True
        found = compare(run, baseline, gates, shorter)
        return replace(found, gradient=_first_gradient(folder, options.runs[0]))

    runs, controls = ([*map(compared, folders)] for folders in (options.runs, options.expect_fail))
    return PlainReport(runs, controls)


def _first_gradient(run: Path, baseline: Path) -> float | None:
    """The largest error of a gradient, at the first iteration that both runs saved."""
    errors = [] if run == baseline else gradient_errors(run, Baseline((baseline,)))
    first = min((error.iteration for error in errors), default=0)
    found = [error.relative_error for error in errors if error.iteration == first]
    return float(np.max(found)) if found else None  # nan counts; max() may pass it over


def _with_noise(options: argparse.Namespace) -> NoiseReport:
    gates = NoiseGates(**_given(options, {name: name for name in NOISE}))
    if gates.last_steps < 1:
        raise UsageError(
            f"--last-steps must be at least 1, got {gates.last_steps}; pass a number of steps"
        )
    measuring = options.noise or options.mean_of
    first = [] if options.mean_of else options.runs[:1]
    others = options.runs[len(first) :]
    for run in {*others, *options.expect_fail} & set(measuring):
        raise UsageError(
            f"a noise run measures other runs, got {run} as both; train the baseline once more"
        )
    if first:
        floor = read_noise_floor(first[0], measuring, gates)
    else:
        floor = read_mean_floor(measuring, gates, options.steps)
    baseline = Baseline(tuple(first or measuring))

    def judged(run: Path) -> Judged:
        evidence = read_evidence(run, baseline)
        if options.steps is None:
            return judge(evidence, floor, options.allow_shorter)
        _require_steps([evidence.curves, *floor.noise_curves], options)
        return judge(evidence.first(options.steps), floor, allow_shorter=True)

    runs, controls = ([*map(judged, folders)] for folders in (others, options.expect_fail))
    return NoiseReport(floor, runs, controls)


def _given(options: argparse.Namespace, names: dict[str, str]) -> dict[str, Any]:
    """Thresholds that were passed, by field."""
    values = {field: getattr(options, name) for field, name in names.items()}
    return {field: value for field, value in values.items() if value is not None}


def _refuse_other_gates(options: argparse.Namespace) -> None:
    """Refuse thresholds of the other kind of comparison, which would have no effect."""
    assert set(NOISE) == {f.name for f in fields(NoiseGates)}, "an option for every gate"
    plain = [name for name, _ in PLAIN.values()]
    noisy = _measures_noise(options)
    other: Sequence[str] = plain if noisy else list(NOISE)
    for name in other:
        if getattr(options, name) is not None:
            how = "has no effect with --noise and --mean-of" if noisy else "needs --noise"
            raise UsageError(f"{_option(name)} {how}, got it there; leave one of them out")


def _threshold(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _figure(report: PlainReport | NoiseReport, options: argparse.Namespace) -> list[str]:
    try:
        from megatron_magi.viz.style import save

        drawn = report.draw()
    except ImportError as error:
        if not (options.quiet or options.json):
            print(f"no figure: {error}")
        return []
    return [str(path) for path in save(drawn, options.out, ("png", "svg"))]
