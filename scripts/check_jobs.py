"""Which published training jobs start with `--attention-backend magi`, and what keeps others out.

    python scripts/check_jobs.py --megatron CHECKOUT [--bridge CHECKOUT] [--record FILE.json]

CHECKOUT of Megatron-LM holds megatron/core, tests/functional_tests and examples. Its own parser
reads the arguments of every job for pretrain_gpt.py and pretrain_hybrid.py, and all refusals of the
launcher are applied to them, as if TransformerEngine was there. Nothing is trained. The job's
`--attention-backend` is replaced by ours and `--attention-dropout 0` is added; a line says how many
jobs need it. Needs PyYAML. Without `--bridge` nothing of Megatron-Bridge is read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any

from check_hooks import prepare_any_version, start_on_any_device
from published_jobs.examples import find_examples
from published_jobs.jobs import Found, Job, find_tests, flags_of, without_repeats
from published_jobs.table import SETS, Row, left_out_lines, stray_lines, table

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    """Print the tables, and write the record if one is asked for."""
    given = _parser().parse_args(argv)
    logging.disable(logging.INFO)
    sys.path[:0] = [str(given.megatron.resolve())]
    version = prepare_any_version()
    start_on_any_device()
    found = Found()
    found.add(find_tests(given.megatron))
    found.add(find_examples(given.megatron))
    jobs = without_repeats(found.jobs)
    from megatron_magi.launcher.megatron_flags import megatron_parser

    rows, unread = rows_of(jobs, megatron_parser())
    print(f"Megatron {version}: {len(found.jobs)} jobs, {len(jobs)} of them different")
    print(*left_out_lines(found.left_out, unread), *stray_lines(rows), sep="\n")
    print(*table(rows, SETS), sep="\n")
    if given.bridge is not None:
        recipes, unread_recipes = print_recipes(given.bridge)
        rows, unread = rows + recipes, unread | unread_recipes
    if given.record is not None:
        sources = {"megatron": f"{version} ({given.megatron.resolve().name})"}
        sources |= {} if given.bridge is None else {"bridge": given.bridge.resolve().name}
        write_record(given.record, rows, sources | describe(found, unread))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=checkout("megatron/core"), required=True)
    parser.add_argument("--bridge", type=checkout("src/megatron/bridge"))
    parser.add_argument("--record", type=new_file, help="JSON file to write")
    return parser


def checkout(inside: str) -> Callable[[str], Path]:
    """A type for argparse: a folder that holds ``inside``."""

    def read(text: str) -> Path:
        if not (Path(text) / inside).is_dir():
            raise argparse.ArgumentTypeError(f"must hold {inside}, got {text}; name a checkout")
        return Path(text)

    return read


def new_file(text: str) -> Path:
    """A file to write, in a folder that exists; for argparse."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text}")
    return path


def print_recipes(bridge: Path) -> tuple[list[Row], dict[str, str]]:
    """The tables of Megatron-Bridge's recipes; returns their rows and what could not be read."""
    from published_jobs.bridge import LIBRARY, PERFORMANCE, read_recipes, sets_of

    from megatron_magi.launcher.megatron_flags import megatron_parser

    rows, unread = read_recipes(bridge, megatron_parser().parse_args([]))
    print("", f"Megatron-Bridge: {len(rows)} recipes", *left_out_lines(Counter(), unread), sep="\n")
    for kind in (LIBRARY, PERFORMANCE):
        print("", *table(rows, sets_of(rows, kind)), sep="\n")
    return rows, unread


def rows_of(
    jobs: Iterable[Job], parser: argparse.ArgumentParser
) -> tuple[list[Row], dict[str, str]]:
    """(a row for each job that the parser can read, why it cannot read the others)."""
    rows, unread = [], {}
    for job in jobs:
        try:
            rows.append(row_of(job, parser))
        except (ValueError, TypeError, AssertionError, argparse.ArgumentError) as error:
            unread[job.name] = str(error)
    return rows, unread


def row_of(job: Job, parser: argparse.ArgumentParser) -> Row:
    """The job under our switch.

    Raises:
        ValueError: the parser does not take a value.
    """
    from published_jobs.rules import reasons

    from megatron_magi.launcher.flags import take_flags

    own = [w for flag in flags_of(job.words) if flag[0] != "--attention-backend" for w in flag]
    _, rest = take_flags([*own, "--attention-backend", "magi"])
    args, strays = parser.parse_known_args(rest)
    dropout, args.attention_dropout = args.attention_dropout, 0.0
    marks = {
        "active": job.is_active,
        "cp": args.context_parallel_size > 1,
        "release": job.is_release,
    }
    given = tuple(name for name, holds in marks.items() if holds)
    names = tuple(sorted(reasons(args)))
    return Row(job.name, job.kind, given, names, job.num_places, tuple(strays), dropout)


def describe(found: Found, unread: dict[str, str]) -> dict[str, Any]:
    """What was counted, and by which code."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return {
        "cpu": platform.machine(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": date.today().isoformat(),
        "command": "scripts/check_jobs.py",
        "jobs_with_repeats": len(found.jobs),
        "left_out": dict(found.left_out.most_common()),
        "unreadable": unread,
    }


def write_record(path: Path, rows: list[Row], meta: dict[str, Any]) -> None:
    """One line a row."""
    lines = ",\n  ".join(json.dumps(_short(row)) for row in rows)
    head = json.dumps(meta, indent=1)
    path.write_text(f'{{"meta": {head},\n "rows": [\n  {lines}\n ]}}\n')


def _short(row: Row) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    given = dataclasses.asdict(row)
    usual = {field.name: field.default for field in dataclasses.fields(Row)}
    return {name: value for name, value in given.items() if value != usual[name]}


if __name__ == "__main__":
    raise SystemExit(main())
