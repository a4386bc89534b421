"""The tables of check_jobs.py's record: which published jobs start with the switch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from scripts.published_jobs.table import SETS, Row, counts, set_table, shown
from tools.readme_records import newest, source

BRIDGE_SETS: dict[str, Callable[[Row], bool]] = {
    "Megatron-Bridge's recipes": lambda row: row.kind == "recipes",
    "its performance recipes": lambda row: row.kind == "perf_recipes",
    "of these for H100": lambda row: row.kind == "perf_recipes" and "h100" in row.marks,
}


def jobs_table() -> str:
    """Jobs by where they are published, and what keeps others out."""
    record = newest("jobs")
    if record is None:
        return "No record yet: run `python scripts/check_jobs.py --record`.\n"
    rows = [Row(**row) for row in record["rows"]]
    lines = [*set_table(rows, SETS | BRIDGE_SETS), "", *reason_table(rows)]
    return "\n".join([*lines, "", _sources(record["meta"]), source(record)]) + "\n"


def reason_table(rows: list[Row]) -> Iterator[str]:
    """Every reason: in how many jobs it appears / how many it alone keeps out."""
    yield "| what keeps a job out: in jobs / alone | Megatron-LM | recipes | performance recipes |"
    yield "|---|---|---|---|"
    sets = (SETS["all"], *list(BRIDGE_SETS.values())[:2])
    found = [counts(filter(belongs, rows)) for belongs in sets]
    for reason in counts(rows):
        pairs = (counted.get(reason) for counted in found)
        cells = (f"{pair[0]} / {pair[1]}" if pair else "-" for pair in pairs)
        yield f"| {shown(reason)} | {' | '.join(cells)} |"


def _sources(meta: dict[str, Any]) -> str:
    left_out = ", ".join(f"{count} {reason}" for reason, count in meta["left_out"].items())
    bridge = f", Megatron-Bridge {meta['bridge']}" if "bridge" in meta else ""
    return (
        f"Megatron-LM {meta['megatron']}{bridge}; unreadable: {len(meta['unreadable'])}. Left out "
        f"of Megatron-LM: {left_out}."
    )
