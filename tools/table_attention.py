"""Rows of the tables of attention alone: the kernel, and distributed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from tools.readme_records import Record
from tools.record_index import date_of
from tools.record_table import Row, pivot

PEERS = ("cudnn", "flex", "fa3", "fa4")
FLASH = ("fa3", "fa4")
HEAD_START_MS = 5.0
"""That the host has in a round of benchmarks/distributed/slowest_rank.py."""


def kernel_rows(*records: Record) -> list[Row]:
    """A row for each mask: by direction and length, TFLOP/s of each implementation.

    A cell comes whole, because its peers ran in the same rounds. It is from the newest day that
    has it, and there from the record with most implementations.
    """
    masks = {row["mask"]: {"mask": row["mask"]} for record in records for row in record["rows"]}
    cells = [
        (date_of(record["file"]), len(cell), cell)
        for record in records
        for cell in pivot(record["rows"], "mask seqlen direction", "impl")
    ]
    for _, _, cell in sorted(cells, key=lambda each: each[:2]):
        row = masks[cell["mask"]]
        row[f"{cell['direction']}_{cell['seqlen']}"] = cell | {"over": _over_best_peer(cell)}
    return list(masks.values())


def _over_best_peer(cell: Row) -> str:
    """TFLOP/s of magi, and their ratio to those of the fastest peer."""
    if "ours" not in cell:
        return "-"
    magi = cell["ours"]["tflops"]
    speeds = [(cell[impl]["tflops"], impl) for impl in PEERS if impl in cell]
    best, name = max(speeds, default=(0, ""))
    return f"{magi:.0f} ({magi / best:.2f}x {name})" if best else f"{magi:.0f}"


def head_size_rows(record: Record) -> list[Row]:
    """A row for each head size and mask: by length, both directions and their ratios to the
    faster of FlashAttention-3 and 4."""
    found = pivot(record["rows"], "head_dim mask", "direction seqlen impl")
    for row in found:
        row["name"] = (
            f"{row['head_dim']}, values 128" if row["head_dim"] == 192 else row["head_dim"]
        )
        for length in (4096, 16384):
            speeds, ratios = zip(
                *(_next_to_flash(row, f"{way}_{length}") for way in ("fwd", "bwd")), strict=True
            )
            row[f"both_{length}"] = f"{' / '.join(speeds)} ({' / '.join(ratios)})"
    return found


def _next_to_flash(row: Row, cell: str) -> tuple[str, str]:
    """(TFLOP/s of magi, their ratio to the faster FlashAttention's)."""
    magi = row[f"{cell}_ours"]["tflops"]
    best = max(row[f"{cell}_{peer}"]["tflops"] for peer in FLASH if f"{cell}_{peer}" in row)
    return f"{magi:.0f}", f"{magi / best:.2f}"


def deterministic_rows(record: Record) -> list[Row]:
    """A row for each mask: by length, each deterministic backward's share of magi's fast one."""
    found = pivot(record["rows"], "mask", "seqlen impl")
    for row in found:
        for cell in [*row]:
            if cell.endswith("deterministic"):
                row[cell] = f"{1 / row[cell]['ratio']:.2f}"
    return found


def distributed_rows(record: Record) -> list[Row]:
    """A row for each mask that magi was timed on at the greatest length."""
    found = pivot(record["rows"], "ranks tokens mask", "impl direction")
    rows = [row for row in found if "ours_fwd" in row and ":" not in row["mask"]]
    for row in rows:
        of_a_ring = row["tokens"] * (row["ranks"] - 1)
        row["received"] = max(row["ours_fwd"]["received_rows"]) / max(of_a_ring, 1)
    longest = max(row["tokens"] for row in rows)
    return [row for row in rows if row["tokens"] == longest]


def te_rows(*columns: str) -> Callable[..., list[Row]]:
    """Rows of TransformerEngine's methods, a mask each, and a column for each of the words.

    A word is KERNEL_TOKENS_RANKS, such as fa3_16384_4.
    """

    def rows(*records: Record) -> list[Row]:
        packs: dict[tuple[str, str], list[Ratio]] = {}
        for record in records:
            for group in pivot(record["rows"], "mask ranks tokens", "impl direction"):
                for kernel in KERNELS:
                    column = f"{kernel}_{group['tokens']}_{group['ranks']}"
                    packs.setdefault((_kind(group), column), []).extend(_best_way(group, kernel))
        cells = {key: _over_magi(ratios) for key, ratios in packs.items()}
        return [
            {"mask": mask} | {column: cells.get((mask, column), "-") for column in columns}
            for mask in sorted({mask for mask, _ in packs})
        ]

    return rows


KERNELS = ("fa3", "cudnn")
Ratio = tuple[float, str, bool]
"""A method's time over magi's, forward and backward together; its name; whether its GPU waited."""


def _kind(row: Row) -> str:
    """The mask, or the distribution of a pack."""
    return str(row["mask"].split(":")[0])


def _best_way(group: Row, kernel: str) -> list[Ratio]:
    """The fastest method, or none."""
    ways = {}
    for way in ("ours", "p2p", "all_gather", "a2a"):
        impl = way if way == "ours" else f"te_{kernel}_{way}"
        runs = [group[key] for key in (f"{impl}_fwd", f"{impl}_bwd") if key in group]
        if len(runs) == 2:
            waited = any(run["host_ms"] > HEAD_START_MS for run in runs)
            ways[way] = sum(run["ms"] for run in runs), way, waited
    magi = ways.pop("ours", None)
    best = min(ways.values(), default=None)
    return [(best[0] / magi[0], *best[1:])] if magi and best else []


def _over_magi(packs: list[Ratio]) -> str:
    """The median of the packs' ratios with its spread, and the fastest methods."""
    if not packs:
        return "-"
    ratios, ways, waits = zip(*packs, strict=True)
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    methods = ", ".join(sorted(set(ways)))
    return f"{median(ratios):.2f}x{spread}, {methods}{' *' if any(waits) else ''}"
