"""The index of the stored records: what each is of, and which files speak of it."""

from __future__ import annotations

import fnmatch
import functools
import json
import re
import subprocess
from pathlib import Path

from tools.readme_records import RECORDS, ROOT, Record

REQUIRED = ("date", "commit", "command")
"""What every record's meta has; beside them `gpu`, `cpu`, `machine` or `platform`."""
MACHINES = ("gpu", "cpu", "machine", "platform")


def index_table() -> str:
    """A line for every record, a file or a folder of runs."""
    lines = ["| record | date | machine | commit | cited in |", "|---|---|---|---|---|"]
    for path in entries():
        meta = json.loads(path.read_text())["meta"] if path.is_file() else {}
        machine = next((str(meta[name]) for name in MACHINES if meta.get(name)), "see its runs")
        commit = meta.get("commit", "see its runs")
        shown = [f"[`{path.name}`]({path.name})", date_of(path), machine, _short(commit)]
        lines.append("| " + " | ".join([*shown, ", ".join(cited_in(path))]) + " |")
    return "\n".join(lines) + "\n"


def entries() -> list[Path]:
    """Records by name; folders hold several runs' files."""
    return sorted(path for path in RECORDS.iterdir() if path.suffix == ".json" or path.is_dir())


def date_of(path: Path) -> str:
    """The day in a record's name."""
    found = re.search(r"\d{4}-\d\d-\d\d", path.name)
    return found[0] if found else ""


def missing_in(record: Record) -> list[str]:
    """What a record ought to have and has not."""
    meta = record.get("meta") or {}
    missing = [name for name in REQUIRED if not meta.get(name)]
    if not any(meta.get(name) for name in MACHINES):
        missing.append("a machine")
    has_content = record.get("rows") or record.get("runs")
    return missing if has_content else [*missing, "rows or runs"]


def cited_in(path: Path) -> list[str]:
    """Files of the repository that name the record, alone or by a pattern with a star."""
    stem = path.name.removesuffix(".json")
    return [name for name, words in _words().items() if _names(words, stem)]


def _names(words: set[str], stem: str) -> bool:
    if stem in words:
        return True
    return any("*" in word and fnmatch.fnmatch(stem, word) for word in words)


@functools.cache
def _words() -> dict[str, set[str]]:
    """Words that may be names of records, of every file that is not a record."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.py", "*.yaml"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    found = {}
    for name in listed:
        if not name.startswith("benchmarks/records/") and (ROOT / name).is_file():
            words = re.findall(r"[\w.*-]{8,}", (ROOT / name).read_text())
            found[name] = {word.strip(".").removesuffix(".json") for word in words}
    return found


def _short(commit: object) -> str:
    several = commit if isinstance(commit, list) else [commit]
    return ", ".join(re.sub(r"\b([0-9a-f]{8})[0-9a-f]{32}\b", r"\1", str(one)) for one in several)
