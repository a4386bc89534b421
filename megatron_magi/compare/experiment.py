"""Reads and writes an experiment: one JSON file with the curves of all its runs.

A path below the file names a run: `records/llama.json/stock_1`. The file has "meta" (date, commit,
command, machine) and, in "runs", the columns of each run's `RunCurves` by name. Numbers keep all
their digits, so a run that was written is read as it was. JSON has no inf and nan; they are text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_magi.compare.differences import Curve, RunCurves
from megatron_magi.compare.model_facts import ModelFacts
from megatron_magi.compare.positions import Bucket
from megatron_magi.compare.run_error import RunError

SUFFIX = ".json"
CURVES = ("loss", "grad_norm", "step_seconds", "tokens_per_second")
Row = Mapping[str, Any]
"""A gradient's error, as a line of gradient_errors.csv has it."""


class SavedRun(NamedTuple):
    """Everything that a comparison reads of a run."""

    curves: RunCurves
    model: ModelFacts | None = None
    gradients: Iterable[Row] = ()


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


def write(
    path: Path, runs: Iterable[SavedRun], meta: Mapping[str, Any], **more: Mapping[str, Any]
) -> None:
    """Writes an experiment, each run by the name of its curves.

    Args:
        meta: date, commit, command and machine, as every record has them.
        more: further sections, such as printed verdicts.
    """
    named = {run.curves.name: _columns(run) for run in runs}
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(_text({"meta": meta, **more, "runs": named}) + "\n")
    unfinished.replace(path)


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


def _columns(run: SavedRun) -> dict[str, Any]:
    """Returns a run as JSON has it; what it does not have is left out."""
    curves, model, gradients = run
    positions = [{**asdict(b), "loss": loss} for b, loss in curves.by_position.items()]
    found = {
        "first_iteration": curves.first_iteration,
        "loss_tokens": curves.loss_tokens,
        "num_processes": curves.num_processes,
        **{name: getattr(curves, name).tolist() for name in CURVES},
        "validation": {str(i): loss for i, loss in curves.validation.items()},
        "positions": _transposed(positions),
        "model": model and asdict(model),
        "gradients": _transposed(gradients),
    }
    optional = ("positions", "model", "gradients")
    return {name: _plain(x) for name, x in found.items() if x or name not in optional}


def _transposed(given: Iterable[Row]) -> dict[str, list[Any]]:
    rows = list(given)
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def _plain(value: Any) -> Any:
    """Returns the value with inf and nan as text."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any, depth: int = 0) -> str:
    """Returns JSON with a column a line, so that a diff shows which changed."""
    is_nested = isinstance(value, dict) and any(isinstance(x, list) for x in value.values())
    if not value or not isinstance(value, dict) or (depth > 2 and not is_nested):
        return json.dumps(value, allow_nan=False)
    space = " " * depth
    lines = [f"{space} {json.dumps(name)}: {_text(x, depth + 1)}" for name, x in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{space}}}"
