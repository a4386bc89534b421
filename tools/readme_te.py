"""The tables next to TransformerEngine: training steps, and attention alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron_magi import HeadShape
from megatron_magi.launcher.changed_arguments import MASK_FLAG
from tools.readme_records import Record, newest, source

WARM_UP = 3
"""Steps before the first that counts."""
PEAK_TFLOPS = 989.4
"""Dense bf16 rate of an H100 or H200 with SXM, TFLOP/s."""
HEAD_START_MS = 5.0
"""That the host has in a round of benchmarks/distributed/attn.py."""
STOPPED = " *"
"""Mark after the time of a run that did not reach its last step."""
KINDS = ("", "fp8", "sft", "recompute")
"""Words of a case's name; runs of one kind are compared with each other."""
LAYOUT = re.compile(r"((cp|tp|pp)\d+)+")
"""Word of a case's name; runs of one layout are compared with each other."""
Row = dict[str, Any]
FIRST_SHAPE = HeadShape(64, 8, 128)
"""That of rows which do not tell theirs."""


def step_table() -> str:
    """Time of a training step of Megatron's own script with TransformerEngine's layers."""
    record = newest("te_pretrain")
    if record is None:
        return "No record yet: run `python -m benchmarks.train.pretrain te_speed` on two GPUs.\n"
    lines = [
        "| model | sequence | run | first step, ms | ms a step | share of peak "
        "| over the fastest stock run |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = [row for row in _fair(record) if len(row["ms"]) > WARM_UP]
    for place in sorted({_place(row) for row in rows}):
        lines += _steps(*place, [row for row in rows if _place(row) == place])
    ended = f"{STOPPED.strip()}: it ended before its last step, and the record says why."
    notes = [ended] if any("error" in row for row in rows) else []
    return "\n".join([*lines, "", *notes, source(record)]) + "\n"


def whole_step_table() -> str:
    """Whole steps with and without the flag, both with their maintainers' flags, call by call: the
    calls ran on different machines."""
    record = newest("te_steps")
    if record is None:
        return "No record yet: run `python -m benchmarks.train.pretrain te_speed_2gpus`.\n"
    lines = [
        "| model | sequence | layout | call | magi, ms | stock by method, ms "
        "| over the fastest stock | first step, ms: magi, stock "
        "| memory of a rank, MiB: magi, stock |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    calls = {(*_place(row), row["round"]) for row in record["rows"]}
    for call in sorted(calls):
        rows = [row for row in record["rows"] if _place(row) == call[:3]]
        lines += _call(call, [row for row in rows if row["round"] == call[3]], _best_way(rows))
    return "\n".join([*lines, "", source(record)]) + "\n"


def _best_way(rows: list[Row]) -> str | None:
    """The stock case that was fastest in any call."""
    stock = [row for row in rows if row["case"].startswith("stock")]
    return min(stock, key=_step_ms)["case"] if stock else None


def _call(call: tuple[str, int, str, int], rows: list[Row], best: str | None) -> list[str]:
    """The line of one model, length and layout in one call; none if magi or stock's best way did
    not run in it."""
    model, length, layout, number = call
    magi = [row for row in rows if row["case"].startswith("magi")]
    stock = sorted((row for row in rows if row["case"].startswith("stock")), key=_step_ms)
    if not magi or best not in {row["case"] for row in stock}:
        return []
    ways = [
        f"{way} {_step_ms(row):,.0f}"
        for row in stock
        for way in [" ".join(row["case"].split()[2:4])]
    ]
    pair = (magi[0], stock[0])
    first = ", ".join(f"{row['ms'][0]:,.0f}" for row in pair)
    peak = ", ".join(f"{float(row['memory'][-1]):,.0f}" for row in pair)
    over = _step_ms(stock[0]) / _step_ms(magi[0])
    cells = [model, f"{length:,}", layout, str(number + 1), f"{_step_ms(magi[0]):,.0f}"]
    return ["| " + " | ".join([*cells, "; ".join(ways), f"{over:.2f}x", first, peak]) + " |"]


def _step_ms(row: Row) -> float:
    """Median of a run's steps after its warm-up."""
    return median(row["ms"][WARM_UP:])


def step_profile_table() -> str:
    """Parts of a step's time, with the flag and without."""
    record = newest("te_pretrain")
    rows = [row for row in _fair(record) if "profile" in row] if record else []
    if record is None or not rows:
        return "No record yet: run `python -m benchmarks.train.pretrain te_speed --only profile`.\n"
    kinds = list(rows[0]["profile"]["parts_ms"])
    head = ["run", "step", *kinds, "exchange, hidden too"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        profile = row["profile"]
        times = [profile["step_ms"], *(profile["parts_ms"][kind] for kind in kinds)]
        shown = [f"{ms:,.0f}" for ms in [*times, profile["busy_ms"]["exchange"]]]
        lines.append("| " + " | ".join([f"`{row['case'].replace(' profile', '')}`", *shown]) + " |")
    note = "Its record is that of the table of steps."
    return "\n".join([*lines, "", note]) + "\n"


def attention_table(
    shape: HeadShape = FIRST_SHAPE, tokens: int | None = None, *, notes: bool = True
) -> str:
    """Time of TransformerEngine's context parallelism over magi's, forward and backward together.

    Args:
        shape: heads of the rows to show.
        tokens: tokens of a GPU of the rows to show; None shows all.
        notes: False leaves out the note and the records, for a second table of a section.
    """
    found = [newest(f"te_attention_{kernel}") for kernel in ("fa3", "cudnn")]
    if None in found:
        return "No record yet: run `python -m benchmarks.distributed.attn` with `te_` methods.\n"
    names = ("FlashAttention-3", "cuDNN")
    lines = [
        f"| mask | GPUs x tokens | {' | '.join(f'best method on {name}' for name in names)} |",
        "|---|---|---|---|",
    ]
    times = [_times(record, shape) for record in found if record is not None]
    keys = sorted({key[:3] for each in times for key in each}, key=lambda k: (-k[2], k[0]))
    for mask, ranks, length in keys:
        if tokens in (None, length):
            cells = [_cell(each, (mask, ranks, length)) for each in times]
            lines.append(f"| `{mask}` | {ranks} x {length // 1024}k | {' | '.join(cells)} |")
    if not notes:
        return "\n".join(lines) + "\n"
    note = (
        "A cell has the time of the fastest of p2p, all_gather and a2a over magi's, forward and "
        "backward together, and that method's name. Several packs have median (lowest to highest). "
        "*: the method's GPU waited, because its host took more than its head start of "
        f"{HEAD_START_MS:.0f} ms."
    )
    sources = [source(record) for record in found if record is not None]
    return "\n".join([*lines, "", note, *sources]) + "\n"


def _fair(record: Record) -> list[Row]:
    """Returns the rows without stock runs whose data loader built an attention mask."""
    return [
        row for row in record["rows"] if "stock" not in row["case"] or MASK_FLAG in row["flags"]
    ]


def _steps(model: str, length: int, place: str, rows: list[Row]) -> list[str]:
    """Lines of one model, length and layout; of each kind the slowest run first."""
    lines = []
    for kind in KINDS:
        cases = {row["case"] for row in rows if kind_of(row["case"]) == kind}
        runs = [Runs(case, [row for row in rows if row["case"] == case]) for case in cases]
        stock = [each.ms for each in runs if "stock" in each.case]
        for each in sorted(runs, key=lambda each: (-each.ms, each.case)):
            name = each.case.removesuffix(f" {model} {length}")
            ours = name.startswith("magi")
            over = f"{min(stock) / each.ms:.2f}x" if stock and ours else "-"
            counted = kind == "" and "documents" not in name
            rate = f"{_share(each.rows[0], each.ms, length):.0%}" if counted else "-"
            cells = [model, f"{length:,}", f"`{name}`", each.first, str(each), rate, over]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


@dataclass
class Runs:
    """One case, each time that it was run."""

    case: str
    """The case's name."""
    rows: list[Row]
    """What each run logged."""

    @property
    def ms(self) -> float:
        """Milliseconds of a step: the median of the runs' medians."""
        return median(self._each())

    def _each(self) -> list[float]:
        return [median(row["ms"][WARM_UP:]) for row in self.rows]

    @property
    def first(self) -> str:
        """Milliseconds of the first step, or the least and the most of several runs."""
        times = sorted(row["ms"][0] for row in self.rows)
        return " to ".join(f"{ms:,.0f}" for ms in dict.fromkeys((times[0], times[-1])))

    def __str__(self) -> str:
        each = self._each()
        spread = f" ({min(each):,.0f} to {max(each):,.0f}; {len(each)} runs)"
        stopped = STOPPED if any("error" in row for row in self.rows) else ""
        return f"{self.ms:,.0f}{spread if len(each) > 1 else ''}{stopped}"


def kind_of(case: str) -> str:
    """What is trained in another way than in bf16 on causal sequences; or `profile`."""
    found = [word for word in case.split() if word in (*KINDS, "profile")]
    return found[0] if found else ""


def _share(row: Row, ms: float, length: int) -> float:
    """Share of the GPU's dense rate: products of weights and of causal attention, three times the
    forward; norms, loss and optimizer are not counted."""
    words = row["flags"]
    value = {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}
    names = ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads")
    layers, width, inner, heads = (int(value[f"--{name}"]) for name in names)
    groups, batch = int(value["--num-query-groups"]), int(value["--global-batch-size"])
    vocabulary = -(-(int(value["--vocab-size"]) + 1) // 64) * 64
    of_layer = width * (2 * width + 2 * width * groups // heads + 3 * inner)
    weights = layers * of_layer + vocabulary * width
    flops = 6 * weights * length * batch + 12 * batch * layers * width * length**2 / 2
    return flops / (row["gpus"] * ms * 1e9 * PEAK_TFLOPS)


def _place(row: Row) -> tuple[str, int, str]:
    """Model, length, and the layout if the case's name has one."""
    *words, model, length = row["case"].split()
    layouts = [word for word in words if LAYOUT.fullmatch(word)]
    return model, int(length), "".join(layouts)


@dataclass
class Time:
    """Forward and backward of one implementation on one mask."""

    ms: float = 0.0
    """Milliseconds of both together, of the slowest rank."""
    waits_for_host: bool = False
    """Whether the host took longer than its head start, so that the GPU waited."""

    def add(self, row: Row) -> None:
        """Count another direction."""
        self.ms += row["ms"]
        self.waits_for_host |= row["host_ms"] > HEAD_START_MS


Times = dict[tuple[str, int, int, str], dict[str, Time]]
"""(mask or kind of packs, ranks, tokens of a rank, mask) -> every implementation's time."""


def _times(record: Record, shape: HeadShape) -> Times:
    times: Times = {}
    for row in record["rows"]:
        of_row = HeadShape(*row["heads"], row["head_dim"]) if "heads" in row else FIRST_SHAPE
        if of_row != shape:
            continue
        key = row["mask"].split(":")[0], row["ranks"], row["tokens"], row["mask"]
        times.setdefault(key, {}).setdefault(row["impl"], Time()).add(row)
    return times


def _cell(times: Times, key: tuple[str, int, int]) -> str:
    ratios, methods, waits = [], set(), False
    for where, of_mask in times.items():
        rivals = {name: time for name, time in of_mask.items() if name.startswith("te_")}
        if where[:3] == key and rivals and "ours" in of_mask:
            name = min(rivals, key=lambda each: rivals[each].ms)
            ratios.append(rivals[name].ms / of_mask["ours"].ms)
            methods.add(name.split("_", 2)[2])
            waits |= rivals[name].waits_for_host
    if not ratios:
        return "-"
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{median(ratios):.2f}x{spread}, {', '.join(sorted(methods))}{' *' if waits else ''}"
