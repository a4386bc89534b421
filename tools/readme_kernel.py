"""Tables of the kernel and its peers, from the records of benchmarks/kernel/speed.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tools.readme_records import Record, newest, records, source

PEERS = ("cudnn", "flex", "fa3", "fa4", "ffa")
SHOWN_LENGTHS = (4096, 16384, 65536)
PEER_LENGTH = 16384
NO_KERNEL_RECORD = "No record yet: run `python -m benchmarks.kernel.speed` on a Hopper GPU.\n"

LEVEL_NOTES = {
    "autograd": "All implementations ran through autograd, in random order in every round.",
    "op": "All implementations ran below autograd, in random order in every round.",
    None: (
        "Not all were timed at one level. magi and cuDNN's documents and windows ran below "
        "autograd; fa3, flex and cuDNN's dense masks ran through it, with its GPU launches but no "
        "host time. The order was the same in every round."
    ),
}
"""By the level in a record's meta; older records have none."""

Cell = tuple[str, int]
"""Mask, tokens."""


@dataclass
class KernelCells:
    """TFLOP/s on visible area of one direction: cell -> implementation -> figure.

    Each cell (mask, tokens) comes whole, because its peers ran in the same rounds. It is from the
    newest day that has it, and there from the record with most implementations.
    """

    figures: dict[Cell, dict[str, float]]
    origin: dict[Cell, Path]

    @property
    def peers(self) -> list[str]:
        return [p for p in PEERS if any(p in figures for figures in self.figures.values())]

    def best_peer(self, cell: Cell) -> str | None:
        figures = self.figures.get(cell, {})
        return max((p for p in PEERS if p in figures), key=lambda p: figures[p], default=None)

    def ratio(self, cell: Cell) -> float | None:
        """Speed of magi over the fastest peer."""
        figures, best = self.figures.get(cell, {}), self.best_peer(cell)
        return figures["ours"] / figures[best] if best and "ours" in figures else None


def kernel_cells(direction: str) -> KernelCells:
    cells, ranks = KernelCells({}, {}), dict[Cell, tuple[str, int]]()
    for record in records("kernel"):
        found: dict[Cell, dict[str, float]] = {}
        for r in record["rows"]:
            if r["direction"] == direction:
                found.setdefault((r["mask"], r["seqlen"]), {})[r["impl"]] = r["tflops"]
        for cell, figures in found.items():
            rank = (day(record["file"]), len(figures))
            if rank > ranks.get(cell, ("", 0)):
                ranks[cell] = rank
                cells.figures[cell], cells.origin[cell] = figures, record["file"]
    return cells


def day(file: Path) -> str:
    match = re.search(r"\d{4}-\d{2}-\d{2}", file.name)
    return match[0] if match else ""


def kernel_summary() -> str:
    """One line per mask: magi at three lengths, forward and backward, over the fastest peer."""
    tables = [kernel_cells(direction) for direction in ("fwd", "bwd")]
    heads = [f"{word} {n // 1024}k" for word in ("forward", "backward") for n in SHOWN_LENGTHS]
    lines = ["| mask | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for mask in masks_of(*tables):
        shown = [summary_cell(cells, (mask, n)) for cells in tables for n in SHOWN_LENGTHS]
        lines.append(f"| `{mask}` | " + " | ".join(shown) + " |")
    note = (
        "A cell has magi's TFLOP/s. The bracket has its ratio to the fastest peer of the same run; "
        "a cell without one had no peer."
    )
    return kernel_page(lines, note, *tables)


def summary_cell(cells: KernelCells, cell: Cell) -> str:
    ours, ratio = cells.figures.get(cell, {}).get("ours"), cells.ratio(cell)
    if ours is None:
        return "-"
    name = f" {cells.best_peer(cell)}" if len(cells.peers) > 1 else ""
    return f"{ours:.0f}" + (f" ({ratio:.2f}x{name})" if ratio else "")


def kernel_peers() -> str:
    """magi and every peer at one length, one line per mask: forward / backward."""
    tables = [kernel_cells(direction) for direction in ("fwd", "bwd")]
    peers = [p for p in PEERS if any(p in cells.peers for cells in tables)]
    impls = ["ours", *peers]
    lines = [f"| mask, {PEER_LENGTH // 1024}k | " + " | ".join(["magi", *peers]) + " |"]
    lines.append("|---|" + "---|" * len(impls))
    for mask in masks_of(*tables):
        pairs = [
            " / ".join(figure(cells, (mask, PEER_LENGTH), impl) for cells in tables)
            for impl in impls
        ]
        lines.append(f"| `{mask}` | " + " | ".join(pairs).replace("- / -", "-") + " |")
    if len(lines) == 2:
        return NO_KERNEL_RECORD
    note = (
        "A cell has forward / backward. A - was not measured, or the peer cannot do that mask. "
        "Its records are those of the table of all lengths."
    )
    return "\n".join([*lines, "", note]) + "\n"


def host_table() -> str:
    """Microseconds that a call keeps the host, one line per implementation and level."""
    record = newest("host")
    if record is None:
        return "No record yet: run `python -m benchmarks.kernel.host` on a Hopper GPU.\n"
    us = {(r["impl"], r["level"], r["direction"]): r for r in record["rows"]}
    lines = ["| us a call, median (least) | forward | backward |", "|---|---|---|"]
    for impl, level in dict.fromkeys(key[:2] for key in us):
        pair = [us[impl, level, direction] for direction in ("fwd", "bwd")]
        shown = " | ".join(f"{r['us']:.0f} ({r['min_us']:.0f})" for r in pair)
        lines.append(f"| {impl.replace('ours', 'magi')}, {level} | {shown} |")
    return "\n".join([*lines, "", source(record)]) + "\n"


def figure(cells: KernelCells, cell: Cell, impl: str) -> str:
    value = cells.figures.get(cell, {}).get(impl)
    return "-" if value is None else f"{value:.0f}"


def masks_of(*tables: KernelCells) -> list[str]:
    return list(dict.fromkeys(mask for cells in tables for mask, _ in cells.figures))


def kernel_page(lines: list[str], note: str, *tables: KernelCells) -> str:
    """The table, the meaning of its cells, and its records."""
    files = {file for cells in tables for file in cells.origin.values()}
    if not files:
        return NO_KERNEL_RECORD
    used = [record for record in records("kernel") if record["file"] in files]
    below = [*([note] if note else []), level_note(used), *map(source, used)]
    return "\n".join([*lines, "", *below]) + "\n"


def level_note(used: list[Record]) -> str:
    """How the implementations were called in these records."""
    days: dict[str | None, list[str]] = {}
    for record in used:
        days.setdefault(record["meta"].get("level"), []).append(day(record["file"]))
    if len(days) == 1:
        return LEVEL_NOTES[next(iter(days))]
    return " ".join(
        f"Records of {', '.join(dict.fromkeys(of))}: {LEVEL_NOTES[level]}"
        for level, of in days.items()
    )
