"""Tables of Llama-3 1B: gradients against fp32, loss curves, and one checkpoint held out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.train import gradient_gates as gates
from benchmarks.train.two_groups import report, seen
from megatron_magi.compare.read_run import read_run
from tools.readme_records import Record
from tools.record_table import Row

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


def gradient_rows(record: Record) -> list[Row]:
    """A row for each run, with its cells by weights; and the limits of each."""
    found: dict[str, Row] = {name: {"title": title} for name, title in NAMES.items()}
    share = f"{gates.SHARE_OF_A_RUN}, above {gates.SHARE_OF_A_CONTROL}"
    limits = {"title": "**limit** of the flag, of controls"}
    for (weights, _), (stock, *others) in gates.comparisons(record["file"]).items():
        limits[weights] = f"{gates.MEDIAN} | {gates.WORST} | {share}"
        for each in others:
            if each.name in found:
                found[each.name].setdefault(weights, _cells(each, stock))
    return [*found.values(), limits]


def held_out_rows(record: Record) -> list[Row]:
    """A row for each program that read the checkpoint."""
    names = {"cudnn": "stock on cuDNN", **NAMES}
    return [{**row, "program": names[row["run"].removeprefix("held_")]} for row in record["rows"]]


def curve_rows(record: Record) -> Iterator[Row]:
    """Losses, the time of a step and model FLOPS of each run."""
    for name, title in CURVES.items():
        run = record["runs"][name]
        ms = 1e3 * np.median([float(x) for x in run["step_seconds"][SETTLED:]])
        rate = 1e3 * float(record["meta"]["tflop_per_gpu_and_step"]) / ms
        held_out = run["validation"][str(len(run["loss"]))]
        loss = np.mean(run["loss"])
        yield {"title": title, "loss": loss, "held_out": held_out, "ms": ms, "rate": rate}


def curve_figures(record: Record) -> str:
    """Tables of what two_groups says of the curves."""
    stock, magi = (
        [read_run(record["file"] / run) for run in CURVES if run.startswith(group)]
        for group in ("stock", "flag")
    )
    figures, _ = report(stock, magi, [100, 300])
    control = seen([read_run(record["file"] / CONTROL)], stock, [*stock, *magi])
    return "\n".join([*figures, *control, ""])


def _cells(each: gates.Judged, stock: gates.Judged) -> str:
    """Median and worst error over stock's; of a control its own share, else the largest beside
    stock's."""
    ratios = each.ratios(stock)
    beside = max(abs(share - stock.shares[name]) for name, share in each.shares.items())
    share = each.shares.get(each.name, beside)
    return f"{np.median(ratios):.3f} | {ratios.max():.3f} | {share:.2f}"
