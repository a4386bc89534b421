"""The benchmark's record: written after every cell, so that a run that was killed leaves one."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.command import command_line
from megatron_magi.cli.parser import UsageError

KEYS = ("head_dim", "mask", "seqlen", "direction", "impl")
"""What names a row; records of before 2026-11-28 may lack head_dim."""


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def describe(command: str, commit: str | None) -> dict[str, Any]:
    """The day, the machine and the versions; every record's meta begins with them."""
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit"
    first = _output(["nvidia-smi", query, "--format=csv,noheader"]).partition("\n")[0]
    gpu, driver, *clocks = (x.strip() for x in (first or ",").split(","))
    return {
        "date": str(datetime.date.today()),
        "gpu": gpu,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "commit": commit or _output(["git", "rev-parse", "HEAD"]),
        "clocks": " / ".join(clocks),
        "command": command,
    }


def describe_cpu() -> dict[str, Any]:
    """The same of a program that uses no GPU: the CPU in its place, and how busy it was."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    of_run = describe(command_line(), None)
    return {
        "cpu": next((line.split(":")[1].strip() for line in lines if "model name" in line), ""),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **{name: of_run[name] for name in ("date", "commit", "command")},
    }


class Record:
    """Rows so far and the file that holds them; with ``append`` the file's other cells stay."""

    def __init__(self, path: Path | None, meta: dict[str, Any], append: bool = False) -> None:
        self.path, self.meta = path, dict(meta)
        self.rows: list[dict[str, Any]] = []
        if append and path is not None and path.exists():
            old = json.loads(path.read_text())
            before = old["meta"]["command"]
            commands = [before] if isinstance(before, str) else before
            self.rows, self.meta["command"] = old["rows"], [*commands, meta["command"]]

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Rows of one cell, in place of what was there of this cell."""
        if not rows:
            return
        cell = _named(rows[0], KEYS[:-1])
        self.rows = [r for r in self.rows if _named(r, KEYS[:-1]) != cell] + rows
        self.write()

    def finish(self, meta: dict[str, Any]) -> None:
        """The clocks are those at the end, of a warm card."""
        self.meta["clocks"] = meta["clocks"]
        self.write()

    def write(self) -> None:
        write_record(self.path, self.meta, self.rows)


def write_record(path: Path | None, meta: dict[str, Any], rows: list[Any], **more: Any) -> None:
    """Write a record, or replace it as a whole; nothing without a path."""
    if path is None:
        return
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"meta": meta, **more, "rows": rows}, indent=1) + "\n")
    partial.replace(path)


def record_of(path: Path, program: str, keys: Sequence[str] = ()) -> dict[str, Any]:
    """The record of a program, whose rows all have these keys.

    Raises:
        UsageError: the file is no record, or that of another program.
    """
    record = json.loads(path.read_text())
    rows = record.get("rows") if isinstance(record, dict) else None
    if not isinstance(rows, list) or not all(_has(row, keys) for row in rows):
        having = f" having {', '.join(keys)}" if keys else ""
        raise UsageError(
            f"a record of {program} is needed, with rows{having}, got {path} without them; name "
            f"another file"
        )
    return record


def _has(row: Any, keys: Sequence[str]) -> bool:
    return isinstance(row, dict) and set(keys) <= row.keys()


def _named(row: dict[str, Any], keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in keys)


def slower(rows: list[dict[str, Any]], path: Path) -> list[str]:
    """What is over 15 % slower than in that record. Printed only: machines are noisy."""
    there = json.loads(path.read_text())
    keys = [key for key in KEYS if all(key in row for row in there["rows"])]
    old = {_named(row, keys): row["tflops"] for row in there["rows"]}
    return [
        f"slower: {' '.join(map(str, name))} {old[name]} -> {row['tflops']}"
        for row in rows
        if (name := _named(row, keys)) in old and row["tflops"] < 0.85 * old[name]
    ]
