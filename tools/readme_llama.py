"""Tables of Llama-3 1B: gradients against fp32, loss curves, and one checkpoint held out."""

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
from benchmarks.train.two_groups import report, seen
from megatron_magi.compare.read_run import read_run
from tools.readme_records import Record, newest, source

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

CURVES = {
    "stock_fa3": "stock on FlashAttention-3, DP 4",
    "stock_cudnn_1": "stock on cuDNN, DP 4",
    "stock_cudnn_2": "stock on cuDNN, DP 4, again",
    "flag_dp2_cp2": "flag, DP 2 x CP 2",
    "flag_cp4": "flag, CP 4",
    "flag_tp2_cp2": "flag, TP 2 x CP 2",
}
"""Runs of 300 steps; stock's names begin with stock."""
CONTROL = "curve_late"
SETTLED = 10
"""Steps in which shapes are still new."""


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


def curves_table() -> str:
    """Losses, the time of a step and model FLOPS of each run, and what two_groups says of them."""
    record = newest("llama_curves")
    if record is None:
        return "No record yet: run `python -m benchmarks.train.llama curves`.\n"
    lines = ["| run | mean training loss | held-out loss | step, ms | TFLOP/s on a GPU |",
             "|---|---|---|---|---|"]  # fmt: skip
    lines += [f"| {title} | {_curve_cells(record, run)} |" for run, title in CURVES.items()]
    stock, magi = (
        [read_run(record["file"] / run) for run in CURVES if run.startswith(group)]
        for group in ("stock", "flag")
    )
    figures, _ = report(stock, magi, [100, 300])
    control = seen([read_run(record["file"] / CONTROL)], stock, [*stock, *magi])
    return "\n".join([*lines, "", *figures, *control, "", source(record)]) + "\n"


def _curve_cells(record: Record, name: str) -> str:
    run = record["runs"][name]
    ms = 1e3 * float(np.median([float(x) for x in run["step_seconds"][SETTLED:]]))
    rate = 1e3 * float(record["meta"]["tflop_per_gpu_and_step"]) / ms
    held_out = run["validation"][str(len(run["loss"]))]
    return f"{np.mean(run['loss']):.5f} | {held_out:.5f} | {ms:.0f} | {rate:.0f}"


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
