"""The stored records, for the tables of README and docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"

Record = dict[str, Any]


def records(prefix: str) -> list[Record]:
    """Oldest first: file names end in the date."""
    files = sorted(RECORDS.glob(f"{prefix}_*.json"))
    return [{**json.loads(file.read_text()), "file": file} for file in files]


def newest(prefix: str) -> Record | None:
    return next(reversed(records(prefix)), None)


def source(record: Record) -> str:
    meta = record["meta"]
    shown = [str(meta[k]) for k in ("gpu", "cpu", "date", "torch") if meta.get(k)]
    path = record["file"].relative_to(ROOT)
    return f"Record: [`{path.name}`]({path}) ({', '.join(shown)})."
