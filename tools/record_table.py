"""A table of a page as data: which records, which rows of them, and how a row is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tools.readme_records import newest, records, source

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Called, it is the lines of a Markdown table, and one for each record that it is from."""

    records: str
    """Prefixes of records' names, with spaces between; the newest record of each is read."""
    heads: str
    """The first line, with ``|`` between columns."""
    line: str
    """The format string of a row's line; a key that the row lacks becomes a dash."""
    rows: Callable[..., Iterable[Row]] = lambda record: record["rows"]
    """Takes the records."""
    below: Callable[..., str] = lambda *found: ""
    """Makes text between the table and its sources, of the records."""
    every: bool = False
    """All records of the prefix are read, oldest first."""

    def __call__(self) -> list[str]:
        names = self.records.split()
        found = records(*names) if self.every else [newest(name) for name in names]
        below = [*filter(None, [self.below(*found)]), *map(source, found)]
        table = markdown(self.heads, self.line, self.rows(*found))
        return [*table, "", *below] if below else table


def markdown(heads: str, line: str, rows: Iterable[Row]) -> list[str]:
    """Lines of a table without what stands below it."""
    lines = [f"| {heads} |", "|---" * (heads.count(" | ") + 1) + "|"]
    for row in rows:
        parts = [_filled(part, row) for part in re.split(r"( \| | / )", line)]
        lines.append(f"| {''.join(parts).replace('- / -', '-')} |")
    return lines


def _filled(part: str, row: Row) -> str:
    try:
        return part.format_map(row)
    except KeyError:
        return "-"


def pivot(rows: Iterable[Row], by: str, over: str) -> list[Row]:
    """One row for each value of the keys ``by``. It holds each of its source rows under that row's
    values of the keys ``over``, joined by ``_``."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        head = {key: row[key] for key in by.split()}
        group = found.setdefault(tuple(head.values()), head)
        group["_".join(str(row[key]) for key in over.split())] = row
    return list(found.values())
