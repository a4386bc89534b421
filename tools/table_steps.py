"""Rows of the tables of training steps: their losses, and their times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from benchmarks.lib.changed_arguments import MASK_FLAG
from tools.readme_records import Record
from tools.record_table import Row

WARM_UP = 3
"""Steps before the first that counts."""
PEERS = {
    "cp2 mla": "stock cp2 mla fused",
    "cp2 gpt-oss": "stock cp1 gpt-oss",
    "pp2 documents": "magi cp1 documents",
    "cp2 documents": "magi cp1 documents",
}
"""Cases of `flags` that stock Megatron has none of its own for, and what they are compared with."""


def agreement_rows(record: Record) -> list[Row]:
    """Jobs of the last run, without those of an odd shape."""
    last = max(row["run"] for row in record["rows"])
    return [row for row in record["rows"] if row["run"] == last and "odd" not in row["case"]]


def flag_rows(record: Record) -> Iterator[Row]:
    """A row for each job with the flag, with its relative differences from its peer's losses."""
    runs = {row["case"]: row["loss"] for row in record["rows"] if len(row["loss"]) == 20}
    for case, loss in runs.items():
        kind, _, name = case.partition(" ")
        if kind == "magi" and "deterministic" not in name:
            peer = PEERS.get(name, f"stock {name}")
            apart = [abs(a / b - 1) for a, b in zip(loss, runs.get(peer, []), strict=False)]
            yield {"name": name, "loss": loss} | ({"peer": peer, "apart": apart} if apart else {})


def whole_rows(*records: Record) -> Iterator[Row]:
    """A row for each model, length and layout, of all runs of all records."""
    rows = [row for record in records for row in record["rows"]]
    plain = [row for row in rows if _place(row)[2] not in KINDS]
    for (model, length, layout), some in _grouped(plain, _place).items():
        if {_is_stock(row) for row in some} == {True, False}:
            yield {"model": model, "length": length, "layout": layout} | _compared(some)


def long_rows(*records: Record) -> Iterator[Row]:
    """Those whose steps the host does not limit."""
    return (row for row in whole_rows(*records) if row["length"] > HOST_BOUND)


HOST_BOUND = 8192
"""Tokens of sequences whose steps both programs' hosts limit on these machines."""
KINDS = ("profile", "fp8", "recompute", "sft-short", "sft-long")
"""Second words of cases that do more than bf16 on causal sequences."""


def packed_rows(record: Record) -> Iterator[Row]:
    """A row for each length of packed fine-tuning."""
    runs = [row for row in record["rows"] if " sft " in row["case"]]
    fair = [row for row in runs if MASK_FLAG in row["flags"] or not _is_stock(row)]
    for (_, length, _), rows in _grouped(fair, _place).items():
        yield {"length": length} | _compared(rows)


def profile_rows(*records: Record) -> list[Row]:
    """Runs whose steps were profiled."""
    rows = [row for record in records for row in record["rows"] if "profile" in row]
    return [row["profile"] | {"run": row["case"].replace("profile ", "")} for row in rows]


def _compared(rows: list[Row]) -> Row:
    """Times of magi, and of stock by its methods, the fastest first."""
    cases = _grouped(rows, lambda row: row["case"])
    ms = {case: median(map(_step_ms, runs)) for case, runs in cases.items()}
    (magi,) = (case for case in cases if case.startswith("magi"))
    stock = sorted(ms.keys() - {magi}, key=lambda case: (ms[case], case))
    pair = cases[magi][0], cases[stock[0]][0]
    ways = [f"{' '.join(x.split()[-4:-2])} {_median(cases[x])}" for x in stock]
    return {
        "magi": _median(cases[magi]),
        "ways": "; ".join(ways),
        "best": ways[0],
        "over": ms[stock[0]] / ms[magi],
        "runs": len(cases[magi]),
        "first": " / ".join(_first_steps(cases[case]) for case in (magi, stock[0])),
        "peak": " / ".join(f"{float(row['memory'][-1]):,.0f}" for row in pair),
    }


def _first_steps(runs: list[Row]) -> str:
    """Seconds of the first step, the least and the most of several runs."""
    each = [run["ms"][0] / 1e3 for run in runs]
    least, most = f"{min(each):.1f}", f"{max(each):.1f}"
    return least if least == most else f"{least} to {most}"


def _grouped(rows: list[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return dict(sorted(found.items()))


def _place(row: Row) -> tuple[str, int, str]:
    """Model, length and layout, by the case's name."""
    words = row["case"].split()
    return words[-2], int(words[-1]), words[1]


def _is_stock(row: Row) -> bool:
    return str(row["case"]).startswith("stock")


def _step_ms(row: Row) -> float:
    """Median of a run's steps after its warm-up."""
    return float(median(row["ms"][WARM_UP:]))


def _median(runs: list[Row]) -> str:
    """That of the runs' medians, with the least and the most of several runs."""
    each = sorted(map(_step_ms, runs))
    spread = f" ({each[0]:,.0f} to {each[-1]:,.0f})" if runs[1:] else ""
    return f"{median(each):,.0f}{spread}"
