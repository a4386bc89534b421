"""The checksum beside a corpus, by which a run that goes on knows its data."""

from __future__ import annotations

import json
from pathlib import Path


def packed_sha256(prefix: str | Path) -> str | None:
    """The checksum that PREFIX.json has of the packed data; None if it has none."""
    try:
        stats = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    checksum = stats.get("sha256") if isinstance(stats, dict) else None
    return checksum if isinstance(checksum, str) else None
