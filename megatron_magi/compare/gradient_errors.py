"""Measures how far a run's saved gradients are from a baseline's, and keeps the errors as CSV.

RUN/gradient_errors.csv is small, while gradients have gigabytes. A comparison reads it if those of
the run or of its baseline are gone.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import get_type_hints

import numpy as np

from megatron_magi.compare import experiment
from megatron_magi.compare.differences import Curve
from megatron_magi.compare.run_error import RunError
from megatron_magi.compare.wgrads import (
    Gradient,
    Pieces,
    joined,
    read_wgrads,
    saved_iterations,
    without_tied_output,
)

ERRORS = "gradient_errors.csv"
BLOCK = 1 << 22
"""Elements that are read and squared at a time: 32 MiB in double precision."""
THREADS = 8
"""Parameters measured at a time; each takes about 100 MB."""


@dataclass(frozen=True)
class Baseline:
    """The folders of one run, or of several whose mean is the baseline."""

    runs: tuple[Path, ...]
    """One or more."""

    @property
    def name(self) -> str:
        """As reports and gradient_errors.csv call it."""
        names = [run.name for run in self.runs]
        return names[0] if len(names) == 1 else f"mean of {', '.join(sorted(names))}"

    def without(self, run: Path) -> Baseline:
        """The other runs."""
        return Baseline(tuple(other for other in self.runs if other != run))


@dataclass(frozen=True)
class GradientError:
    """The error of a parameter's gradient; a line of the CSV."""

    iteration: int
    parameter: str
    norm: float
    """L2 norm of the run's gradient."""
    baseline_norm: float
    relative_error: float
    """||g - g_ref|| / ||g_ref||; 0 if both are 0, infinite if only g_ref is."""
    baseline: str
    """Name of the baseline run."""


def gradient_errors(run: Path, baseline: Baseline) -> list[GradientError]:
    """Errors of every iteration whose gradients the run and all of the baseline saved.

    They are measured from these, parameter by parameter, and written to the run's CSV. Those of
    iterations whose gradients are gone are read from that CSV.

    Raises:
        RunError: other parameters than the baseline's, or a CSV measured against another run.
    """
    saved = set.intersection(*(_saved(each) for each in (run, *baseline.runs)))
    known = [e for e in read_errors(run) if e.iteration not in saved]
    others = {e.baseline for e in known} - {baseline.name}
    if others:
        raise RunError(
            f"{run / ERRORS} must hold errors against {baseline.name}, got {sorted(others)[0]}; "
            f"compare where both runs' gradients are, or take that baseline"
        )
    measured = [e for i in sorted(saved) for e in _measure(run, baseline, i)]
    errors = sorted([*known, *measured], key=lambda e: e.iteration)
    if measured:
        _write(run, errors)
    return errors


def read_errors(run: Path) -> list[GradientError]:
    """The errors in a run's CSV or experiment; none if there are none.

    Raises:
        RunError: a comparison did not write it like this.
    """
    path = run if experiment.is_run(run) else run / ERRORS
    try:
        return [_error_of(row) for row in _rows_of(path)]
    except RunError:
        raise
    # No such column, a cut line or no number.
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{ERRORS} must have the columns and numbers that a comparison writes, got {error!r} "
            f"in {path}; remove it, and compare where the gradients are"
        ) from None


def _rows_of(path: Path) -> Sequence[experiment.Row]:
    if experiment.is_run(path):
        return experiment.read_gradients(path)
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _error_of(row: experiment.Row) -> GradientError:
    """Files of 2026 have "reference" in the names of two columns."""
    row = {name.replace("reference", "baseline"): text for name, text in row.items()}
    kinds = get_type_hints(GradientError)
    return GradientError(**{name: kind(row[name]) for name, kind in kinds.items()})


def _saved(run: Path) -> set[int]:
    if experiment.is_run(run):  # it has measured errors alone
        return set()
    return set(saved_iterations(run))


def _measure(run: Path, baseline: Baseline, iteration: int) -> list[GradientError]:
    folders = (run, *baseline.runs)
    found = [read_wgrads(folder, iteration) for folder in folders]
    if len({str(_shapes(pieces)) for pieces in found}) > 1:  # other layouts, perhaps
        found = [joined(pieces) for pieces in found]
    if len({len(pieces) for pieces in found}) > 1:
        found = [without_tied_output(pieces) for pieces in found]
    of_run, *others = map(_shapes, found)
    for each, expected in zip(baseline.runs, others, strict=True):
        if of_run != expected:
            other = sorted(n for n in of_run | expected if of_run.get(n) != expected.get(n))
            raise RunError(
                f"gradients to compare must be of one model, got another {other[0]} in iteration "
                f"{iteration} of {run.name} than in {each.name}; train them with one recipe"
            )
    norms = partial(_norms, found)
    with ThreadPoolExecutor(THREADS) as pool:  # gigabytes; numpy releases the interpreter's lock
        measured = list(pool.map(norms, of_run))
    return [
        GradientError(iteration, n, *of, baseline.name)
        for n, of in zip(of_run, measured, strict=True)
    ]


def _shapes(pieces: Pieces) -> dict[str, list[tuple[int, ...]]]:
    return {name: [part.shape for part in parts] for name, parts in pieces.items()}


def _norms(found: list[Pieces], name: str) -> tuple[float, float, float]:
    """Norm of the first run's gradient and of the others' mean, and its relative error."""
    squares = np.zeros(3)
    for gradients in zip(*(pieces[name] for pieces in found), strict=True):
        squares += _squares(gradients)
    norm, baseline_norm, gap_norm = (float(x) for x in np.sqrt(squares))
    unequal = math.inf if gap_norm else 0.0
    return norm, baseline_norm, gap_norm / baseline_norm if baseline_norm else unequal


def _squares(gradients: Sequence[Gradient]) -> Curve:
    squares = np.zeros(3)
    for of_run, *others in _blocks(*gradients):
        baseline = np.mean(others, axis=0)
        gap = of_run - baseline
        squares += [np.dot(of_run, of_run), np.dot(baseline, baseline), np.dot(gap, gap)]
    return squares


def _blocks(*arrays: Gradient) -> Iterator[tuple[Curve, ...]]:
    """Arrays of one shape, piece by piece in double precision; only one piece is in memory."""
    flat = [a.reshape(-1) for a in arrays]
    for begin in range(0, flat[0].size, BLOCK):
        yield tuple(a[begin : begin + BLOCK].astype(np.float64) for a in flat)


def _write(run: Path, errors: list[GradientError]) -> None:
    unfinished = run / f".{ERRORS}.partial"
    try:
        with unfinished.open("w", newline="") as file:
            rows = csv.DictWriter(file, [f.name for f in fields(GradientError)])
            rows.writeheader()
            rows.writerows(asdict(e) for e in errors)
        unfinished.replace(run / ERRORS)
    except OSError as error:
        raise RunError(
            f"writing {ERRORS} needs room and a folder that can be written, got {error}; make "
            f"room, or copy the run"
        ) from error
