"""The index of the stored records: what each is of, and which files speak of it."""

from __future__ import annotations

import fnmatch
import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tools.readme_records import RECORDS, ROOT
from tools.record_table import Row

MACHINES = ("gpu", "cpu", "machine", "platform")
"""Keys of a record's meta; every record has one."""
RUNS = "see its runs"


def index_rows() -> Iterator[Row]:
    """A row for every record, a file or a folder of runs."""
    for path in entries():
        meta = json.loads(path.read_text())["meta"] if path.is_file() else {}
        yield {
            "name": path.name,
            "date": date_of(path),
            "machine": next((str(meta[name]) for name in MACHINES if meta.get(name)), RUNS),
            "commit": _short(meta.get("commit", RUNS)),
            "cited_in": ", ".join(cited_in(path)),
        }


def entries() -> list[Path]:
    """Records by name; folders hold several runs' files."""
    return sorted(path for path in RECORDS.iterdir() if path.suffix == ".json" or path.is_dir())


def date_of(path: Path) -> str:
    """The day in a record's name."""
    return "".join(re.findall(r"\d{4}-\d\d-\d\d", path.name)[:1])


def cited_in(path: Path) -> list[str]:
    """Files of the repository that name the record, alone or by a pattern with a star."""
    stem = path.name.removesuffix(".json")
    return [
        name
        for name, words in _words().items()
        if stem in words or any("*" in word and fnmatch.fnmatch(stem, word) for word in words)
    ]


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
