"""The tables of distributed attention, from the records of benchmarks/distributed/attn.py."""

from __future__ import annotations

import statistics
from typing import Any

from tools.readme_records import records, source

PROGRAM = "python -m benchmarks.distributed.attn"
SHOWN = {
    "ours": "magi",
    "kernels": "kernels alone",
    "all_gather": "contiguous all-gather",
    "all_gather_zigzag": "zigzag all-gather",
    "ring": "ring",
    "ulysses": "Ulysses",
    "one_gpu": "one GPU",
    "all_gather_fa3": "contiguous all-gather, FA3",
    "all_gather_zigzag_fa3": "zigzag all-gather, FA3",
    "ring_fa3": "ring, FA3",
    "ulysses_fa3": "Ulysses, FA3",
    "one_gpu_fa3": "one GPU, FA3",
}
"""The last five, on FlashAttention-3, are columns where some record has one of them."""
NOTE = (
    "A cell has forward / backward of the slowest rank, in TFLOP/s per GPU; a - was not measured. "
    "Rows received are those of the fullest rank, in percent of a ring's. All figures of a line "
    "are from one run."
)

Row = dict[str, Any]


def dist_table() -> str:
    """One line per mask and length; a cell: forward / backward in TFLOP/s per GPU."""
    lengths: dict[tuple[int, int], tuple[str, list[Row]]] = {}
    for record in records("dist"):  # oldest first
        named = [r for r in _of_timed_masks(record["rows"]) if ":" not in r["mask"]]
        for length in dict.fromkeys((r["ranks"], r["tokens"]) for r in named):
            rows = [r for r in named if (r["ranks"], r["tokens"]) == length]
            lengths[length] = source(record), rows
    if not lengths:
        return f"No record yet: run `{PROGRAM}` on a host with several GPUs.\n"
    shown = _columns([r for _, rows in lengths.values() for r in rows])
    heads = [*(SHOWN[impl] for impl in shown), "rows received"]
    lines = [f"| mask | GPUs x tokens | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for length in sorted(lengths, reverse=True):
        rows = lengths[length][1]
        masks = dict.fromkeys(r["mask"] for r in rows)
        lines += [_line(mask, length, rows, shown) for mask in masks]
    sources = dict.fromkeys(said for said, _ in lengths.values())
    return "\n".join([*lines, "", NOTE, *sources]) + "\n"


def _of_timed_masks(rows: list[Row]) -> list[Row]:
    """Rows of the masks and lengths that magi was timed on."""
    timed = {(r["mask"], r["ranks"], r["tokens"]) for r in rows if r["impl"] == "ours"}
    return [r for r in rows if (r["mask"], r["ranks"], r["tokens"]) in timed]


def _columns(rows: list[Row]) -> list[str]:
    measured = {r["impl"] for r in rows}
    return [impl for impl in SHOWN if impl in measured or not impl.endswith("_fa3")]


RIVALS = ("all_gather", "all_gather_zigzag", "ring", "ulysses")
ON_FLASH = tuple(f"{name}_fa3" for name in RIVALS)
PACKS_NOTE = (
    "Forward and backward together, medians over the packs (lowest and highest). The share of the "
    "ideal is the time of one GPU with the whole pack, divided by the number of GPUs, over magi's. "
    "The best rival is the fastest other method on magi's kernel, or on FlashAttention-3 (FA3); "
    "a - was not measured."
)


def packs_table() -> str:
    """One line per distribution of documents and length, from the newest record that has it."""
    found: dict[tuple[str, int, int], tuple[str, list[Row]]] = {}
    for record in records("dist"):  # oldest first
        groups: dict[tuple[str, int, int], list[Row]] = {}
        for row in _of_timed_masks(record["rows"]):
            if ":" in row["mask"]:
                key = row["mask"].split(":")[0], row["ranks"], row["tokens"]
                groups.setdefault(key, []).append(row)
        found |= {key: (source(record), rows) for key, rows in groups.items()}
    if not found:
        return f"No record yet: run `{PROGRAM} --masks d1:0-6` on several GPUs.\n"
    heads = ["documents", "GPUs x tokens", "packs", "share of the ideal", "over the best rival"]
    heads.append("over the best on FA3")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [_packs_line(key, rows) for key, (_, rows) in sorted(found.items())]
    return "\n".join([*lines, "", PACKS_NOTE, *dict.fromkeys(s for s, _ in found.values())]) + "\n"


def _packs_line(key: tuple[str, int, int], rows: list[Row]) -> str:
    distribution, ranks, tokens = key
    times: dict[str, dict[str, float]] = {}
    for row in rows:  # of both directions together
        of_mask = times.setdefault(row["mask"], {})
        of_mask[row["impl"]] = of_mask.get(row["impl"], 0.0) + row["ms"]
    shares = [t["one_gpu"] / ranks / t["ours"] for t in times.values() if "one_gpu" in t]
    over = [_over_the_best(rivals, list(times.values())) for rivals in (RIVALS, ON_FLASH)]
    cells = " | ".join(map(_spread, (shares, *over)))
    name, size = f"`{distribution}`", f"{ranks} x {tokens // 1024}k"
    return f"| {name} | {size} | {len(times)} | {cells} |"


def _over_the_best(rivals: tuple[str, ...], packs: list[dict[str, float]]) -> list[float]:
    """The time of the fastest rival over magi's, for the packs that have one."""
    best = [(min((t[r] for r in rivals if r in t), default=None), t["ours"]) for t in packs]
    return [theirs / ours for theirs, ours in best if theirs is not None]


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _line(mask: str, length: tuple[int, int], rows: list[Row], columns: list[str]) -> str:
    cells = {(r["impl"], r["direction"]): r for r in rows if r["mask"] == mask}
    ours, (ranks, tokens) = cells["ours", "fwd"], length
    shown = []
    for impl in columns:
        both = [cells.get((impl, direction)) for direction in ("fwd", "bwd")]
        shown.append(" / ".join("-" if r is None else f"{r['tflops']:.0f}" for r in both))
    received = max(ours["received_rows"]) / max(tokens * (ranks - 1), 1)  # 0 on one rank
    shown.append(f"{received:.0%}")
    cell = " | ".join(x.replace("- / -", "-") for x in shown)
    return f"| `{mask}` | {ranks} x {tokens // 1024}k | {cell} |"
