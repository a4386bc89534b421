"""A row for each published job, and the tables that are counted from the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A job and what keeps it out."""

    name: str
    kind: str
    marks: tuple[str, ...] = ()
    """Of `active`, `cp`, `release`; for a recipe of Bridge its GPU."""
    reasons: tuple[str, ...] = ()
    """Names of what keeps it out, in alphabetical order; none if it is accepted."""
    num_places: int = 1
    """How many files hold this job."""
    strays: tuple[str, ...] = ()
    """Words that the parser does not know; Megatron would stop at them."""
    dropout: float = 0.0
    """The job's own attention dropout, which the launcher requires to be 0."""


SETS: dict[str, Callable[[Row], bool]] = {
    "all": lambda row: row.kind in ("test", "example"),
    "functional tests": lambda row: row.kind == "test",
    "in an active CI recipe": lambda row: "active" in row.marks,
    "context parallelism > 1": lambda row: "cp" in row.marks,
    "release": lambda row: "release" in row.marks,
    "examples": lambda row: row.kind == "example",
}
"""The groups that are counted, of Megatron-LM's jobs."""


def left_out_lines(left_out: Counter[str], unread: dict[str, str]) -> Iterator[str]:
    """How many are not counted, and why."""
    for reason, count in left_out.most_common():
        yield f"  left out: {count} ({reason})"
    for name, error in sorted(unread.items()):
        yield f"  unreadable: {name} ({error})"


def stray_lines(rows: list[Row]) -> Iterator[str]:
    """Jobs that stock Megatron would not start as they stand: they are counted without the words
    that its parser does not know."""
    for row in rows:
        if row.strays:
            yield f"  read without {len(row.strays)} words: {row.name} ({' '.join(row.strays)})"


def table(rows: list[Row], sets: dict[str, Callable[[Row], bool]]) -> Iterator[str]:
    """Each set with its counts, then each reason of the first set."""
    yield from set_table(rows, sets)
    yield ""
    first = next(iter(sets.values()))
    yield "| reason | in jobs | alone |"
    yield "|---|---|---|"
    for reason, (count, alone) in counts(filter(first, rows)).items():
        yield f"| {shown(reason)} | {count} | {alone} |"


def set_table(rows: list[Row], sets: dict[str, Callable[[Row], bool]]) -> Iterator[str]:
    """How many jobs each set has, and how many are accepted."""
    yield "| jobs | files | different | accepted | refused | need `--attention-dropout 0` |"
    yield "|---|---|---|---|---|---|"
    for name, belongs in sets.items():
        some = [row for row in rows if belongs(row)]
        accepted = sum(not row.reasons for row in some)
        dropout = sum(row.dropout != 0 for row in some)
        share = f" ({accepted / len(some):.0%})" if some else ""
        sizes = f"{sum(row.num_places for row in some)} | {len(some)}"
        yield f"| {name} | {sizes} | {accepted}{share} | {len(some) - accepted} | {dropout} |"


def shown(reason: str) -> str:
    """A reason in a page: a flag is code."""
    flag, space, rest = reason.partition(" ")
    return f"`{flag}`{space}{rest}" if flag.startswith("--") else reason


def counts(rows: Iterable[Row]) -> dict[str, tuple[int, int]]:
    """For each reason: in how many jobs it appears, and how many it alone keeps out."""
    found = [row.reasons for row in rows]
    total = Counter(reason for reasons in found for reason in reasons)
    alone = Counter(reasons[0] for reasons in found if len(reasons) == 1)
    order = sorted(total, key=lambda reason: (-total[reason], reason))
    return {reason: (total[reason], alone[reason]) for reason in order}
