"""Makes one JSON of an experiment's runs, which `megatron-magi compare` reads.

    python -m benchmarks.lib.experiment OUT.json FOLDER... --meta commit=0123abcd --meta gpu=H100

A FOLDER is a run that `compare` reads: TensorBoard events, or a steps.csv. The run gets the
folder's name. Gradient errors are those that a comparison has written to it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser, UsageError
from megatron_magi.compare.experiment import SUFFIX, SavedRun, write
from megatron_magi.compare.gradient_errors import read_errors
from megatron_magi.compare.read_run import read_run_and_facts
from megatron_magi.compare.run_error import RunError


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


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
