"""Reads a run: a folder with Megatron's event files or a steps.csv, or a path in an experiment.

A steps.csv, for runs of other programs, has a line for each iteration with the columns iteration,
lm_loss (nats), grad_norm, step_seconds and tokens_per_second; and perhaps validation_loss,
loss_tokens (whose loss counts) and num_processes. A model.json next to it holds `ModelFacts`.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_magi.compare import experiment
from megatron_magi.compare.differences import Curve, RunCurves
from megatron_magi.compare.events import event_folder, read_events
from megatron_magi.compare.model_facts import ModelFacts, read_facts
from megatron_magi.compare.positions import read_positions
from megatron_magi.compare.run_error import RunError

STEPS = "steps.csv"


def read_run(folder: Path) -> RunCurves:
    """The curves of a finished run; see `read_run_and_facts`."""
    return read_run_and_facts(folder)[0]


def read_run_and_facts(folder: Path) -> tuple[RunCurves, ModelFacts | None]:
    """The curves of a finished run, and facts of its model (None if it does not say them).

    Args:
        folder: of a run, or FILE.json/RUN.

    Raises:
        RunError: no iteration in it, a broken file, or a package to read it is missing.
    """
    if experiment.is_run(folder):
        return experiment.read(folder)
    events = None if (folder / STEPS).is_file() else event_folder(folder)
    if events is None:
        run, facts = _read_steps_file(folder), None
    else:
        run, facts = read_events(folder.resolve().name, events)
    return replace(run, by_position=read_positions(folder)), read_facts(folder) or facts


def _read_steps_file(folder: Path) -> RunCurves:
    path = folder / STEPS
    if not path.is_file():
        raise RunError(
            f"a run to compare must have a steps.csv or TensorBoard events, got none in {folder}; "
            f"train it with --tensorboard-dir {folder}"
        )
    rows = _read_rows(path)
    if not rows:
        raise RunError(
            f"a run to compare must have an iteration, got none in {path}; see the run's log"
        )
    try:
        run = _curves(folder.name, rows)
        iterations = [int(r["iteration"]) for r in rows]
    except (KeyError, TypeError, ValueError) as error:  # no such column, a cut line or no number
        raise RunError(
            f"a steps.csv must have the columns and numbers of a run, got {error!r} "
            f"in {path}; write it again"
        ) from None
    if iterations != list(range(iterations[0], iterations[0] + len(rows))):
        raise RunError(
            f"a run to compare must have its iterations one after the other, got gaps in {path}; "
            f"train it again"
        )
    return run


def _read_rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise RunError(
            f"a steps.csv must be text with a line for each iteration, got {error} in {path}; "
            f"restore or remove it"
        ) from error


def _curves(name: str, rows: list[dict[str, str]]) -> RunCurves:
    validated = [r for r in rows if r.get("validation_loss")]
    return RunCurves(
        name=name,
        loss=_column(rows, "lm_loss"),
        grad_norm=_column(rows, "grad_norm"),
        step_seconds=_column(rows, "step_seconds"),
        tokens_per_second=_column(rows, "tokens_per_second"),
        validation={int(r["iteration"]): float(r["validation_loss"]) for r in validated},
        loss_tokens=max(1.0, float(np.median([float(r.get("loss_tokens") or 1) for r in rows]))),
        num_processes=int(rows[-1].get("num_processes") or 0) or None,
        first_iteration=int(rows[0]["iteration"]),
    )


def _column(rows: list[dict[str, str]], name: str) -> Curve:
    return np.array([float(row[name]) for row in rows])
