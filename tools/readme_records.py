"""The stored records, for the tables of README and docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"

Record = dict[str, Any]


def records(prefix: str) -> list[Record]:
    """Oldest first: file names have a date. Raises FileNotFoundError if there is none.

    Args:
        prefix: of the names, or a whole name with ``*`` in it.
    """
    pattern = f"{prefix}.json" if "*" in prefix else f"{prefix}_*.json"
    files = sorted(RECORDS.glob(pattern))
    if not files:
        raise FileNotFoundError(f"a record {pattern} in {RECORDS} is required, found none")
    return [{**json.loads(file.read_text()), "file": file} for file in files]


def newest(prefix: str) -> Record:
    """The record of the last date."""
    return records(prefix)[-1]


def source(record: Record) -> str:
    """The line that names a record below its table."""
    meta = record["meta"]
    shown = [str(meta[k]) for k in ("gpu", "cpu", "date") if meta.get(k)]
    if meta.get("torch"):
        shown.append(f"torch {meta['torch'].partition('+')[0]}")
    return f"[Record]({record['file'].relative_to(ROOT)}): {', '.join(shown)}."
