"""Run the tests that need no GPU under this Python and torch, and record what came out.

    python -m tools.record_suite --record benchmarks/records/suite_cpu_DATE_py3.12_torch2.13.json

docs/versions.md is made from these records; tests/test_versions.py reads it beside them.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "numpy", "megatron-core", "pytest", "hypothesis")
CPU = "not gpu and not multi_gpu and not benchmark"


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--jobs", default="2")
    parser.add_argument("tests", nargs="*", help="default: all")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = run_suite(args, Path(folder) / "junit.xml")
    args.record.write_text(json.dumps(record, indent=1) + "\n")
    (found,) = record["rows"]
    print(f"{found['passed']} passed, {found['skipped']} skipped, failed: {found['failed']}")
    return 1 if found["failed"] or not found["passed"] else 0


def run_suite(args: argparse.Namespace, report: Path) -> dict[str, Any]:
    """Counts of pytest's own report, and the versions that it ran on."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", args.jobs, "--dist", "loadfile",
               "-m", CPU, f"--junit-xml={report}", *args.tests]  # fmt: skip
    began = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    meta = {
        "date": str(datetime.date.today()),
        "commit": _commit(),
        "command": "python -m tools.record_suite " + " ".join(args.tests),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
    }
    counts = {
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": len(skipped),
        "failed": [f"{c.get('classname')}::{c.get('name')}" for c in failed],
        "exit_code": code,
        "seconds": round(time.monotonic() - began),
    }
    return {"meta": meta, "rows": [counts]}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.strip() or None


if __name__ == "__main__":
    raise SystemExit(guarded(main))
