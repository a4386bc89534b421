"""The tables beside TransformerEngine: training steps, and attention alone."""

from __future__ import annotations

from statistics import median
from typing import Any

from readme_records import Record, newest, source

WARM_UP = 3
"""Steps before the first that counts."""
PEAK_TFLOPS = 989.4
"""Dense bf16 rate of an H100 or H200 with SXM, TFLOP/s, of which a step's share is told."""
Row = dict[str, Any]


def step_table() -> str:
    """Time of a training step of Megatron's own script with TransformerEngine's layers."""
    record = newest("te_pretrain")
    if record is None:
        return "No record yet: run `scripts/bench_pretrain.py te_speed` on two GPUs.\n"
    lines = [
        "| model | sequence | run | ms a step | of the GPU's rate | over the best stock run |",
        "|---|---|---|---|---|---|",
    ]
    rows = [row for row in record["rows"] if len(row["ms"]) > WARM_UP]
    for place in sorted({_place(row) for row in rows}):
        here = [row for row in rows if _place(row) == place]
        lines += _steps(*place, {row["case"]: row for row in here})
    return "\n".join([*lines, "", source(record)]) + "\n"


def attention_table() -> str:
    """Time of TransformerEngine's context parallelism over ours, forward and backward together."""
    found = [newest(f"te_attention_{kernel}") for kernel in ("fa3", "cudnn")]
    if None in found:
        return "No record yet: run `scripts/bench_dist_attn.py` with `te_` methods on two GPUs.\n"
    names = ("FlashAttention-3", "cuDNN")
    lines = [
        f"| mask | GPUs x tokens | {' | '.join(f'best method on {name}' for name in names)} |",
        "|---|---|---|---|",
    ]
    times = [_times(record) for record in found if record is not None]
    keys = sorted({key[:3] for each in times for key in each}, key=lambda k: (-k[2], k[0]))
    for mask, ranks, tokens in keys:
        cells = [_cell(each, (mask, ranks, tokens)) for each in times]
        lines.append(f"| `{mask}` | {ranks} x {tokens // 1024}k | {' | '.join(cells)} |")
    note = (
        "A cell has the time of the fastest of p2p, all_gather and a2a over ours, forward and "
        "backward together, and the name of that method; several packs: median, lowest and highest."
    )
    sources = [source(record) for record in found if record is not None]
    return "\n".join([*lines, "", note, *sources]) + "\n"


def _steps(model: str, length: int, runs: dict[str, Row]) -> list[str]:
    """Lines of one model and length, the fastest of the stock runs first."""
    lines = []
    for fp8 in (False, True):
        chosen = {case: row for case, row in runs.items() if ("fp8" in case) == fp8}
        stock = [_ms(row) for case, row in chosen.items() if "stock" in case]
        for case, row in sorted(chosen.items(), key=lambda item: _ms(item[1]), reverse=True):
            name = case.removesuffix(f" {model} {length}")
            ours = name.startswith("magi")
            over = f"{min(stock) / _ms(row):.2f}x" if stock and ours else "-"
            rate = "-" if fp8 or "documents" in name else f"{_share(row, length):.0%}"
            lines.append(f"| {model} | {length:,} | `{name}` | {_ms(row):,.0f} | {rate} | {over} |")
    return lines


def _share(row: Row, length: int) -> float:
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
    return flops / (row["gpus"] * _ms(row) * 1e9 * PEAK_TFLOPS)


def _place(row: Row) -> tuple[str, int]:
    model, length = row["case"].split()[-2:]
    return model, int(length)


def _ms(row: Row) -> float:
    return median(row["ms"][WARM_UP:])


Times = dict[tuple[str, int, int, str], dict[str, float]]
"""(mask or kind of packs, ranks, tokens of a rank, mask) -> milliseconds of every implementation,
forward and backward together."""


def _times(record: Record) -> Times:
    times: Times = {}
    for row in record["rows"]:
        key = row["mask"].split(":")[0], row["ranks"], row["tokens"], row["mask"]
        of_mask = times.setdefault(key, {})
        of_mask[row["impl"]] = of_mask.get(row["impl"], 0.0) + row["ms"]
    return times


def _cell(times: Times, key: tuple[str, int, int]) -> str:
    best = []
    for where, of_mask in times.items():
        rivals = [(ms, name) for name, ms in of_mask.items() if name.startswith("te_")]
        if where[:3] == key and rivals and "ours" in of_mask:
            ms, name = min(rivals)
            best.append((ms / of_mask["ours"], name.split("_", 2)[2]))
    if not best:
        return "-"
    ratios, methods = [ratio for ratio, _ in best], sorted({name for _, name in best})
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{median(ratios):.2f}x{spread}, {', '.join(methods)}"
