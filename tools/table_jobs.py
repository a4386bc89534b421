"""The tables of check_jobs.py's record: which published jobs start with the switch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from scripts.published_jobs.table import SETS, counts, set_table, shown
from scripts.published_jobs.table import Row as Job
from tools.readme_records import Record, newest
from tools.record_table import Row

BRIDGE_SETS: dict[str, Callable[[Job], bool]] = {
    "Megatron-Bridge's recipes": lambda job: job.kind == "recipes",
    "its performance recipes": lambda job: job.kind == "perf_recipes",
    "of these for H100": lambda job: job.kind == "perf_recipes" and "h100" in job.marks,
}


def sets_table() -> Iterator[str]:
    """Jobs by where they are published."""
    jobs = [Job(**row) for row in newest("jobs")["rows"]]
    return set_table(jobs, SETS | BRIDGE_SETS)


def reason_rows(record: Record) -> Iterator[Row]:
    """Every reason: in how many jobs it appears, and how many it alone keeps out."""
    jobs = [Job(**row) for row in record["rows"]]
    sets = {"megatron": SETS["all"], **BRIDGE_SETS}
    found = {name: counts(filter(belongs, jobs)) for name, belongs in sets.items()}
    for reason in counts(jobs):
        pairs = {name: counted[reason] for name, counted in found.items() if reason in counted}
        yield {"reason": shown(reason), **pairs}


def job_sources(record: Record) -> str:
    """Versions that were read, and jobs that are not counted."""
    meta = record["meta"]
    left_out = ", ".join(f"{count} {reason}" for reason, count in meta["left_out"].items())
    return (
        f"Megatron-LM {meta['megatron']}, Megatron-Bridge {meta['bridge']}; unreadable: "
        f"{len(meta['unreadable'])}. Left out of Megatron-LM: {left_out}."
    )
