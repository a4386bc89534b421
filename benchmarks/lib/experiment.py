"""Makes one JSON of an experiment's runs, which `megatron-magi compare` reads.

    python -m benchmarks.lib.experiment OUT.json FOLDER... --meta commit=0123abcd --meta gpu=H100

A FOLDER is a run that `compare` reads: TensorBoard events, or a steps.csv. The run gets the
folder's name. Gradient errors are those that a comparison has written to it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser, UsageError
from megatron_magi.compare.differences import RunCurves
from megatron_magi.compare.experiment import CURVES, SUFFIX, Row
from megatron_magi.compare.gradient_errors import read_errors
from megatron_magi.compare.model_facts import ModelFacts
from megatron_magi.compare.read_run import read_run_and_facts
from megatron_magi.compare.run_error import RunError


class SavedRun(NamedTuple):
    """Everything that a comparison reads of a run."""

    curves: RunCurves
    model: ModelFacts | None = None
    gradients: Iterable[Row] = ()


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of a run")
    parser.add_argument(
        "--meta", action="append", type=fact, default=[], metavar="KEY=VALUE",
        help="date, commit, command, gpu and others; a key that comes twice becomes a list",
    )  # fmt: skip
    options = parser.parse_args()
    require_names(options.out, options.folders)
    try:
        write(options.out, [saved(folder) for folder in options.folders], facts(options.meta))
    except RunError as error:
        raise UsageError(str(error)) from error
    return 0


def fact(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}; name both")
    return key, value


def facts(given: Sequence[tuple[str, str]]) -> dict[str, str | list[str]]:
    """Values by key: a list where there are several, such as commands."""
    by_key: dict[str, list[str]] = {}
    for key, value in given:
        by_key.setdefault(key, []).append(value)
    return {key: values if len(values) > 1 else values[0] for key, values in by_key.items()}


def require_names(out: Path, folders: Sequence[Path]) -> None:
    """Raises UsageError for a file that compare would not know, or two runs of one name."""
    if out.suffix != SUFFIX:
        raise UsageError(f"an experiment's file must end in {SUFFIX}, got {out}; rename it")
    name, count = Counter(folder.resolve().name for folder in folders).most_common(1)[0]
    if count > 1:
        raise UsageError(f"runs must have different names, got {count} of {name}; rename a folder")


def saved(folder: Path) -> SavedRun:
    """The run with what a comparison reads of it."""
    curves, model = read_run_and_facts(folder.resolve())
    return SavedRun(curves, model, [asdict(error) for error in read_errors(folder)])


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


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
