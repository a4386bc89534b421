"""The table of distributed attention, from the records of bench_dist_attn.py."""

from __future__ import annotations

from typing import Any

from readme_records import records, source

SHOWN = {
    "ours": "ours",
    "kernels": "kernels alone",
    "all_gather": "contiguous all-gather",
    "all_gather_zigzag": "zigzag all-gather",
    "ring": "ring",
    "ulysses": "Ulysses",
    "one_gpu": "one GPU",
}
NOTE = (
    "A cell has forward / backward in TFLOP/s per GPU on visible area of the slowest rank; a - was "
    "not measured. Rows received are those of the fullest rank, in percent of a ring's. Every "
    "length is from the newest record that has it, and all figures of a line are from one run."
)

Row = dict[str, Any]


def dist_table() -> str:
    """One line per mask and length; a cell: forward / backward in TFLOP/s per GPU."""
    lengths: dict[tuple[int, int], tuple[str, list[Row]]] = {}
    for record in records("dist"):  # oldest first
        for length in dict.fromkeys((r["ranks"], r["tokens"]) for r in record["rows"]):
            rows = [r for r in record["rows"] if (r["ranks"], r["tokens"]) == length]
            lengths[length] = source(record), rows
    if not lengths:
        return "No record yet: run `scripts/bench_dist_attn.py` on a host with several GPUs.\n"
    heads = [*SHOWN.values(), "forward", "stages in backward", "rows received"]
    lines = [f"| mask | GPUs x tokens | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for length in sorted(lengths, reverse=True):
        rows = lengths[length][1]
        lines += [_line(mask, length, rows) for mask in dict.fromkeys(r["mask"] for r in rows)]
    sources = dict.fromkeys(said for said, _ in lengths.values())
    return "\n".join([*lines, "", NOTE, *sources]) + "\n"


def _line(mask: str, length: tuple[int, int], rows: list[Row]) -> str:
    cells = {(r["impl"], r["direction"]): r for r in rows if r["mask"] == mask}
    ours, (ranks, tokens) = cells["ours", "fwd"], length
    shown = []
    for impl in SHOWN:
        both = [cells.get((impl, direction)) for direction in ("fwd", "bwd")]
        shown.append(" / ".join("-" if r is None else f"{r['tflops']:.0f}" for r in both))
    received = max(ours["received_rows"]) / (tokens * (ranks - 1))
    shown += [f"`{ours['forward_mode']}`", str(ours["overlap_degree"] + 1), f"{received:.0%}"]
    cell = " | ".join(x.replace("- / -", "-") for x in shown)
    return f"| `{mask}` | {ranks} x {tokens // 1024}k | {cell} |"
