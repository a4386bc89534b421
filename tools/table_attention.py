"""Rows of the tables of attention alone: the kernel, and distributed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from tools.readme_records import Record
from tools.record_index import date_of
from tools.record_table import Row, pivot

PEERS = ("cudnn", "flex", "fa3", "fa4")
HEAD_START_MS = 5.0
"""That the host has in a round of benchmarks/distributed/attn.py."""


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


def host_rows(record: Record) -> list[Row]:
    """A row for each implementation and level."""
    rows = ({**row, "impl": row["impl"].replace("ours", "magi")} for row in record["rows"])
    return pivot(rows, "impl level", "direction")


def distributed_rows(record: Record) -> list[Row]:
    """A row for each mask and length that magi was timed on; longest first."""
    found = pivot(record["rows"], "ranks tokens mask", "impl direction")
    rows = [_sized(row) for row in found if "ours_fwd" in row and ":" not in row["mask"]]
    for row in rows:
        of_a_ring = row["tokens"] * (row["ranks"] - 1)
        row["received"] = max(row["ours_fwd"]["received_rows"]) / max(of_a_ring, 1)
    return sorted(rows, key=lambda row: (row["ranks"], row["tokens"]), reverse=True)


def _sized(row: Row) -> Row:
    return {**row, "size": f"{row['ranks']} x {row['tokens'] // 1024}k"}


def te_rows(*heads: int, tokens: int | None = None) -> Callable[..., list[Row]]:
    """Rows of TransformerEngine's methods, for numbers of query and key heads and a head size, and
    for the tokens of a GPU if given. The records are on FlashAttention-3 and on cuDNN."""

    def rows(*records: Record) -> list[Row]:
        found: dict[tuple[int, str], Row] = {}
        for kernel, record in zip(("fa3", "cudnn"), records, strict=True):
            first = {"heads": [64, 8], "head_dim": 128}  # of rows that do not tell theirs
            every = ({**first, **row} for row in record["rows"])
            some = [row for row in every if heads == (*row["heads"], row["head_dim"])]
            for group in pivot(some, "mask ranks tokens", "impl direction"):
                kind = group["mask"].split(":")[0]
                row = found.setdefault((-group["tokens"], kind), {**_sized(group), "mask": kind})
                packs = row.setdefault(f"packs_{kernel}", [])
                packs += _best_way(group, kernel)
                row[kernel] = _over_magi(packs)
        return [found[key] for key in sorted(found) if tokens in (None, -key[0])]

    return rows


def _best_way(group: Row, kernel: str) -> list[tuple[float, str, bool]]:
    """The fastest method: its time over magi's, its name, and whether its GPU waited; or none."""
    ways = {}
    for way in ("ours", "p2p", "all_gather", "a2a"):
        impl = way if way == "ours" else f"te_{kernel}_{way}"
        if runs := [group[key] for key in (f"{impl}_fwd", f"{impl}_bwd") if key in group]:
            waited = any(run["host_ms"] > HEAD_START_MS for run in runs)
            ways[way] = sum(run["ms"] for run in runs), way, waited
    magi = ways.pop("ours", None)
    best = min(ways.values(), default=None)
    return [(best[0] / magi[0], *best[1:])] if magi and best else []


def _over_magi(packs: list[tuple[float, str, bool]]) -> str:
    """The median of the packs' ratios with its spread, and the fastest methods."""
    if not packs:
        return "-"
    ratios, ways, waits = zip(*packs, strict=True)
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    methods = ", ".join(sorted(set(ways)))
    return f"{median(ratios):.2f}x{spread}, {methods}{' *' if any(waits) else ''}"
