"""Reads an experiment: one JSON file with the curves of all its runs.

A path below the file names a run: `records/llama.json/stock_1`. The file has "meta" (date, commit,
command, machine) and, in "runs", the columns of each run's `RunCurves` by name. Numbers keep all
their digits. JSON has no inf and nan; they are text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_magi.compare.differences import Curve, RunCurves
from megatron_magi.compare.model_facts import ModelFacts
from megatron_magi.compare.positions import Bucket
from megatron_magi.compare.run_error import RunError

SUFFIX = ".json"
CURVES = ("loss", "grad_norm", "step_seconds", "tokens_per_second")
Row = Mapping[str, Any]
"""A gradient's error, as a line of gradient_errors.csv has it."""


def is_run(path: Path) -> bool:
    """Returns True for a path below a JSON file, and for the file itself, which lacks a name."""
    return SUFFIX in (path.suffix, path.parent.suffix) and not path.is_dir()


def read(path: Path) -> tuple[RunCurves, ModelFacts | None]:
    """Returns the curves of FILE.json/RUN, and facts of its model (None if it has none).

    Raises:
        RunError: no such file or run, or broken JSON.
    """
    run = _run_of(path)
    try:
        model = run.get("model")
        return _curves(path.name, run), model and ModelFacts(**model)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _broken(path.parent, f"{error!r} in the run {path.name}") from None


def read_gradients(path: Path) -> list[dict[str, Any]]:
    """Returns the gradient errors of FILE.json/RUN; none if it has none.

    Raises:
        RunError: no such file or run, or broken JSON.
        AttributeError, TypeError, ValueError: its gradients are not columns of one length.
    """
    return _rows(_run_of(path).get("gradients", {}))


def _run_of(path: Path) -> dict[str, Any]:
    below = path.parent.suffix == SUFFIX
    file = path.parent if below else path
    try:
        runs = json.loads(file.read_text())["runs"]
        known, run = ", ".join(sorted(runs)), runs.get(path.name) if below else None
    except OSError as error:
        raise RunError(
            f"a run of an experiment must be in a file, got {error}; name another one"
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # no JSON, or another one
        raise _broken(file, repr(error)) from None
    if not isinstance(run, dict):
        given = path.name if below else "none"
        raise RunError(
            f"a path in an experiment must end in the name of a run, got {given} in {file}; "
            f"name one of {known}"
        )
    return run


def _broken(file: Path, what: str) -> RunError:
    return RunError(
        f"an experiment must be JSON with the columns of its runs, got {what} in {file}; restore "
        f"it, or write it again"
    )


def _curves(name: str, run: Mapping[str, Any]) -> RunCurves:
    buckets = {
        Bucket(row["iteration"], row["first"], row["end"]): float(row["loss"])
        for row in _rows(run.get("positions", {}))
    }
    curves = RunCurves(
        name=name,
        **{column: _curve(run[column]) for column in CURVES},
        validation={int(i): float(loss) for i, loss in run["validation"].items()},
        by_position=buckets,
        loss_tokens=float(run["loss_tokens"]),
        num_processes=run["num_processes"],
        first_iteration=int(run["first_iteration"]),
    )
    if len({len(getattr(curves, column)) for column in CURVES}) > 1 or not len(curves.loss):
        raise ValueError("columns of no or of several lengths")
    return curves


def _curve(values: Iterable[float | str]) -> Curve:
    return np.array([float(x) for x in values])


def _rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    values = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]
