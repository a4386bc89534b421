"""Tables of Llama-3 1B: gradients against fp32, and the held-out loss of one checkpoint."""

from __future__ import annotations

import numpy as np

from benchmarks.train.gradient_gates import (
    MEDIAN,
    SHARE_OF_A_CONTROL,
    SHARE_OF_A_RUN,
    WORST,
    Judged,
    comparisons,
)
from tools.readme_records import newest, source

NAMES = {
    "fa3": "stock on FlashAttention-3",
    "magi_cp1": "flag, CP 1",
    "magi_cp4": "flag, CP 4",
    "magi_cp4_deterministic": "flag, CP 4, deterministic",
    "magi_tp2_cp2": "flag, TP 2 x CP 2, next to stock at TP 2",
    "magi_late": "control: a boundary late by one",
    "magi_long_tile": "control: a tile missing in the longest document",
    "magi_short_tile": "control: a tile missing in the shortest",
    "magi_far_keys": "control: far keys hidden",
    "magi_lost": "control: dk and dv lost on one rank",
}
"""Rows of the page, by the names of runs; controls are held beside the first yardstick."""


def gradients_table() -> str:
    """A line for each run: errors over stock's and shares of controls, at each set of weights."""
    record = newest("llama_gradients")
    if record is None:
        return "No record yet: run `python -m benchmarks.train.llama weights gradients`.\n"
    found = _by_run(comparisons(record["file"]))
    weights = list(dict.fromkeys(label for label, _ in next(iter(found.values()))))
    heads = [f"{label}: median | worst | share" for label in weights]
    lines = [f"| run | {' | '.join(heads)} |", f"|{'---|' * (1 + 3 * len(weights))}"]
    for run, cells in found.items():
        shown = [cell for _, cell in cells]
        lines.append(f"| {NAMES[run]} | {' | '.join(shown)} |")
    limit = f"{MEDIAN} | {WORST} | {SHARE_OF_A_RUN}, above {SHARE_OF_A_CONTROL}"
    lines.append(f"| **limit** of the flag, of controls | {' | '.join([limit] * len(weights))} |")
    return "\n".join([*lines, "", source(record)]) + "\n"


def held_out_table() -> str:
    """A line for each program that read the checkpoint."""
    record = newest("llama_held_out")
    if record is None:
        return "No record yet: run `python -m benchmarks.train.llama held_out`.\n"
    lines = ["| program | held-out loss |", "|---|---|"]
    for row in record["rows"]:
        name = {"cudnn": "stock on cuDNN", **NAMES}[row["run"].removeprefix("held_")]
        lines.append(f"| {name} | {row['loss']:.6f} |")
    return "\n".join([*lines, "", source(record)]) + "\n"


def _by_run(held: dict[tuple[str, str], list[Judged]]) -> dict[str, list[tuple[str, str]]]:
    """(weights, cells) of each run of the page, in the page's order."""
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in NAMES}
    for (weights, _), (stock, *others) in held.items():
        for each in others:
            if each.name in found and weights not in dict(found[each.name]):
                found[each.name].append((weights, _cells(each, stock)))
    return found


def _cells(each: Judged, stock: Judged) -> str:
    """Median and worst error over stock's; of a control its own share, else the largest beside
    stock's."""
    ratios = each.ratios(stock)
    beside = max(abs(share - stock.shares[name]) for name, share in each.shares.items())
    share = each.shares.get(each.name, beside)
    return f"{np.median(ratios):.3f} | {ratios.max():.3f} | {share:.2f}"
