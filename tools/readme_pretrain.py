"""The tables of benchmarks/train/pretrain.py: losses of Megatron's pretrain script."""

from __future__ import annotations

from typing import Any

from tools.readme_records import newest, source


def agreement_table() -> str:
    """Losses and gradient norms of every layout, the newest run of a case."""
    record = newest("pretrain_agree")
    if record is None:
        return "No record yet: run `python -m benchmarks.train.pretrain agree` on two GPUs.\n"
    last = max(row["run"] for row in record["rows"])
    lines = [
        "| bf16, 2,048 tokens | loss of step 1 | 2 | 5 | 10 | 20 | gradient norm of step 2 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        if row["run"] != last or len(row["loss"]) < 20 or "odd" in row["case"]:
            continue
        cells = [f"{row['loss'][step - 1]:.5f}" for step in (1, 2, 5, 10, 20)]
        norm = f"{row['grad_norm'][1]:.3f}"
        lines.append(f"| {row['case']} | {' | '.join(cells)} | {norm} |")
    return "\n".join([*lines, "", source(record)]) + "\n"


ALONE = {
    "cp2 fp8 odd": "",
    "cp2 fp8 blockwise odd": "",
    "cp2 fp8 documents": "",
    "tp2 sp overlap odd": "",
    "cp2 mla": "cp2 mla fused",
    "cp2 gpt-oss": "cp1 gpt-oss",
    "cp1 documents": "",
    "pp2 documents": "cp1 documents",
    "cp2 documents": "cp1 documents",
}
"""Cases of `flags` that stock Megatron has none of its own for, and what they are compared with."""


def flags_table() -> str:
    """Losses of jobs with TransformerEngine's layers, one a flag, next to stock Megatron."""
    record = newest("pretrain_flags")
    if record is None:
        return "No record yet: run `python -m benchmarks.train.pretrain flags` on two GPUs.\n"
    whole = [row for row in record["rows"] if len(row["loss"]) == 20]
    by_name = {row["case"]: row for row in whole if "deterministic" not in row["case"]}
    lines = [
        "| job | loss of step 1 | 2 | 3 | 20 | compared with | differs at step 1 | 2 | 3 | 20 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in (n.removeprefix("magi ") for n in by_name if n.startswith("magi ")):
        peer = f"stock {name}"
        if name in ALONE:
            peer = next(
                (n for k in ("stock", "magi") if (n := f"{k} {ALONE[name]}") in by_name), ""
            )
        ours, theirs = (_four(by_name.get(n)) for n in (f"magi {name}", peer))
        cells = [f"{x:.5f}" for x in ours]
        apart = [f"{abs(a / b - 1):.0e}" for a, b in zip(ours, theirs, strict=False)] or ["-"] * 4
        shown = f"`{peer}`" if theirs else "-"
        lines.append(f"| `{name}` | {' | '.join(cells)} | {shown} | {' | '.join(apart)} |")
    return "\n".join([*lines, "", source(record)]) + "\n"


def _four(row: dict[str, Any] | None) -> list[float]:
    """Losses of steps 1, 2, 3 and 20."""
    return [] if row is None else [row["loss"][step - 1] for step in (1, 2, 3, 20)]
