"""Rewrites the measured tables of README and docs from the newest records in benchmarks/records/.

    python scripts/update_readme.py [--check]

A table stands between `<!-- record NAME -->` and `<!-- end -->`; numbers are never typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PEERS = ("cudnn", "flex", "fa3", "fa4", "ffa")
SHOWN_LENGTHS = (4096, 16384, 65536)
NO_KERNEL_RECORD = "No record yet: run `scripts/bench_kernel.py` on a Hopper GPU.\n"

Record = dict[str, Any]


def newest(prefix: str) -> Record | None:
    """The record whose file name sorts last; names end in the date."""
    files = sorted(RECORDS.glob(f"{prefix}_*.json"))
    return {**json.loads(files[-1].read_text()), "file": files[-1]} if files else None


def kernel_cells(record: Record, direction: str) -> dict[tuple[str, int, str], float]:
    """TFLOP/s on visible area by (mask, tokens, implementation)."""
    return {
        (r["mask"], r["seqlen"], r["impl"]): r["tflops"]
        for r in record["rows"]
        if r["direction"] == direction
    }


def kernel_summary() -> str:
    """One line per mask: ours at three lengths, forward and backward, over the best peer."""
    record = newest("kernel")
    if record is None:
        return NO_KERNEL_RECORD
    heads = [f"{word} {n // 1024}k" for word in ("forward", "backward") for n in SHOWN_LENGTHS]
    lines = ["| mask | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    tables = [kernel_cells(record, direction) for direction in ("fwd", "bwd")]
    for mask in dict.fromkeys(key[0] for key in tables[0]):
        shown = [summary_cell(cells, mask, n) for cells in tables for n in SHOWN_LENGTHS]
        lines.append(f"| `{mask}` | " + " | ".join(shown) + " |")
    note = "A cell: ours, in brackets ours over the best peer of the same run (cuDNN where it can)."
    return "\n".join([*lines, "", note, source(record)]) + "\n"


def summary_cell(cells: dict[tuple[str, int, str], float], mask: str, seqlen: int) -> str:
    ours = cells.get((mask, seqlen, "ours"))
    best = max((cells[key] for p in PEERS if (key := (mask, seqlen, p)) in cells), default=None)
    if ours is None:
        return "-"
    return f"{ours:.0f}" + (f" ({ours / best:.2f}x)" if best else "")


def kernel_table(direction: str) -> str:
    """Everything the record has: one line per mask and length."""
    record = newest("kernel")
    cells = kernel_cells(record, direction) if record else {}
    if record is None or not cells:
        return NO_KERNEL_RECORD
    impls = [p for p in PEERS if any(key[2] == p for key in cells)]
    lines = [
        "| mask | tokens | ours | " + " | ".join(impls) + " | ours / best peer |",
        "|---|---|---|" + "---|" * (len(impls) + 1),
    ]
    for mask, seqlen in dict.fromkeys(key[:2] for key in cells if key[2] == "ours"):
        ours = cells[mask, seqlen, "ours"]
        peers = [cells.get((mask, seqlen, p)) for p in impls]
        best = max((p for p in peers if p), default=None)
        ratio = f"{ours / best:.2f}" if best else "-"
        shown = " | ".join("-" if p is None else f"{p:.0f}" for p in peers)
        lines.append(f"| {mask} | {seqlen} | {ours:.0f} | {shown} | {ratio} |")
    return "\n".join([*lines, "", source(record)]) + "\n"


def planner_table() -> str:
    """Rows received and balance of LPT and the search; documents cut at a quarter."""
    record = newest("planner")
    if record is None:
        return "No record yet: run `scripts/bench_planner.py`.\n"
    methods = ("lpt_2048", "lpt_fine", "swap_fine", "swap_auto")
    lines = [
        "| documents | cp | tokens per rank | LPT, chunk 2048 | LPT, chunk 512 | search, chunk 512 "
        "| search, own chunk | plan ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        if row["what"] != "quality" or not row["cut"]:
            continue
        shown = [f"{row[m]['received_own']:.2f} / {row[m]['imbalance_max']:.3f}" for m in methods]
        head = [row["distribution"], str(row["cp_size"]), f"{row['tokens_per_rank'] // 1024}K"]
        time = f"{row['swap_auto']['plan_ms_p50']:.1f}"
        lines.append("| " + " | ".join([*head, *shown, time]) + " |")
    note = "A cell: rows received / highest imbalance of the packs. Time: median, own chunk."
    return "\n".join([*lines, "", note, source(record)]) + "\n"


def source(record: Record) -> str:
    meta = record["meta"]
    shown = [str(meta[k]) for k in ("gpu", "cpu", "date", "torch") if meta.get(k)]
    path = record["file"].relative_to(ROOT)
    return f"Record: [`{path}`]({path}) ({', '.join(shown)})."


TABLES: dict[str, Callable[[], str]] = {
    "kernel": kernel_summary,
    "kernel forward": lambda: kernel_table("fwd"),
    "kernel backward": lambda: kernel_table("bwd"),
    "planner": planner_table,
}


def rewrite(text: str) -> str:
    """The page with every known table made anew."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- record {match[1]} -->\n{TABLES[match[1]]()}<!-- end -->"

    return re.sub(r"<!-- record ([a-z ]+) -->\n.*?<!-- end -->", fill, text, flags=re.S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    args = parser.parse_args()
    pages = {page: page.read_text() for page in PAGES}
    stale = {page: new for page, old in pages.items() if (new := rewrite(old)) != old}
    if args.check:
        return len(stale)
    for page, text in stale.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
