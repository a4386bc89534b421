"""Measures how far a run's dumped gradients are from a baseline's, and keeps the errors as CSV.

RUN/gradient_errors.csv is small, while dumps have gigabytes. A comparison reads it if the dumps of
the run or of its baseline are gone.
"""

from __future__ import annotations

import csv
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import get_type_hints

import numpy as np

from megatron_magi.training.parity.baseline import Baseline
from megatron_magi.training.process.whole_files import written_whole
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.run.gradient_folder import (
    ERRORS,
    blocks,
    dumped_iterations,
    read_gradient,
    read_shapes,
)

THREADS = 8
"""Parameters measured at a time; each takes about 100 MB."""


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
    """Errors of every iteration that the run and all of the baseline dumped.

    They are measured from the dumps, parameter by parameter, and written to the run's CSV. Those of
    iterations whose dumps are gone are read from that CSV.

    Raises:
        RecipeError: other parameters than the baseline's, or a CSV measured against another run.
    """
    dumped = set.intersection(*(set(dumped_iterations(each)) for each in (run, *baseline.runs)))
    known = [e for e in read_errors(run) if e.iteration not in dumped]
    others = {e.baseline for e in known} - {baseline.name}
    if others:
        raise RecipeError(
            f"{run / ERRORS} must hold errors against {baseline.name}, got {sorted(others)[0]}; "
            f"compare where both runs' gradients are, or take that baseline"
        )
    measured = [e for i in sorted(dumped) for e in _measure(run, baseline, i)]
    errors = sorted([*known, *measured], key=lambda e: e.iteration)
    if measured:
        _write(run, errors)
    return errors


def read_errors(run: Path) -> list[GradientError]:
    """The errors in a run's CSV; none if there is no CSV.

    Raises:
        RecipeError: a comparison did not write it like this.
    """
    path = run / ERRORS
    if not path.is_file():
        return []
    try:
        with path.open(newline="") as file:
            return [_error_of(row) for row in csv.DictReader(file)]
    except (
        KeyError,
        TypeError,
        ValueError,
    ) as error:  # no such column, a cut line or no number
        raise RecipeError(
            f"{ERRORS} must have the columns and numbers that a comparison writes, got {error!r} "
            f"in {path}; remove it, and compare where the gradients are"
        ) from None


def _error_of(row: dict[str, str]) -> GradientError:
    """Files of 2026 have "reference" in the names of two columns."""
    row = {name.replace("reference", "baseline"): text for name, text in row.items()}
    kinds = get_type_hints(GradientError)
    return GradientError(**{name: kind(row[name]) for name, kind in kinds.items()})


def _measure(run: Path, baseline: Baseline, iteration: int) -> list[GradientError]:
    shapes = read_shapes(run, iteration)
    for each in baseline.runs:
        expected = read_shapes(each, iteration)
        if shapes != expected:
            other = sorted(n for n in shapes | expected if shapes.get(n) != expected.get(n))
            raise RecipeError(
                f"gradients to compare must be of one model, got another {other[0]} in iteration "
                f"{iteration} of {run.name} than in {each.name}; train them with one recipe"
            )
    with ThreadPoolExecutor(THREADS) as pool:  # gigabytes; numpy releases the interpreter's lock
        return list(pool.map(partial(_error, run, baseline, iteration), shapes))


def _error(run: Path, baseline: Baseline, iteration: int, name: str) -> GradientError:
    gradients = [read_gradient(folder, iteration, name) for folder in (run, *baseline.runs)]
    squares = np.zeros(3)
    for ours, *others in blocks(*gradients):
        theirs = np.mean(others, axis=0)
        gap = ours - theirs
        squares += [np.dot(ours, ours), np.dot(theirs, theirs), np.dot(gap, gap)]
    norm, baseline_norm, gap_norm = (float(x) for x in np.sqrt(squares))
    unequal = math.inf if gap_norm else 0.0
    relative = gap_norm / baseline_norm if baseline_norm else unequal
    return GradientError(iteration, name, norm, baseline_norm, relative, baseline.name)


def _write(run: Path, errors: list[GradientError]) -> None:
    with written_whole([run / ERRORS]) as (unfinished,), unfinished.open("w", newline="") as file:
        rows = csv.DictWriter(file, [f.name for f in fields(GradientError)])
        rows.writeheader()
        rows.writerows(asdict(e) for e in errors)
