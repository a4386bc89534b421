"""Numbers and screens in the docs, computed by the planner and the command line, never typed.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``; a screen is the indented block
behind ``<!-- screen ARGUMENTS -->``.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_magi import AttnMask, CostTable, MagiConfig, masks
from megatron_magi.cli import main as command_line
from megatron_magi.core.plan import AttnPlan, make_attn_plan, predict_times
from megatron_magi.viz.plan_facts import receive_bytes
from tools.docs_figures import HEADS, packed_lengths
from tools.docs_text import fill_tables

ROOT = Path(__file__).parents[1]
TOTAL, CP_SIZE = 131072, 8
LENGTHS = packed_lengths(TOTAL, seed=5)
NO_SEARCH = CostTable(swap_trials=0)
CHUNK_SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "`chunk_size=1024`": {"chunk_size": 1024},
    "`chunk_size=512`": {"chunk_size": 512},
    "`chunk_size=256`": {"chunk_size": 256},
    "`chunk_size=512, costs=CostTable(swap_trials=0)`": {"chunk_size": 512, "costs": NO_SEARCH},
    "`chunk_size=512, max_imbalance=1.05`": {"chunk_size": 512, "max_imbalance": 1.05},
    "`chunk_size=512, max_imbalance=1.2`": {"chunk_size": 512, "max_imbalance": 1.2},
}
STAGE_SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    '`forward_mode="at_once"`': {"forward_mode": "at_once"},
    '`forward_mode="local_first"`': {"forward_mode": "local_first"},
    **{
        f'`forward_mode="staged"`, `overlap_degree={n}`': {
            "forward_mode": "staged",
            "overlap_degree": n,
        }
        for n in (1, 2, 4)
    },
}


def update_page(page: Path) -> None:
    """Rewrite the page's tables and screens in place."""
    text = fill_tables(page.read_text(), {"chunks": chunk_table, "stages": stage_table})
    screen = r"(<!-- screen (.*?) -->\n)((?:    .*\n|\n(?=    ))+)"
    page.write_text(re.sub(screen, lambda m: m[1] + _screen(m[2]), text))


def _screen(arguments: str) -> str:
    """What the command prints here, without the folder of this checkout."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command_line(arguments.split())
    shown = f"$ megatron-magi {arguments}\n{printed.getvalue().rstrip()}\n".replace(
        str(ROOT), "CHECKOUT"
    )
    return "".join(f"    {line}".rstrip() + "\n" for line in shown.splitlines())


def chunk_table() -> Iterator[str]:
    """What chunk sizes and the load cap do to balance and traffic."""
    mask = _packed()
    yield "| setting | chunk | max/mean load | rows received / rows owned |"
    yield "|---|---|---|---|"
    for name, values in CHUNK_SETTINGS.items():
        plan = make_attn_plan(mask, CP_SIZE, HEADS, MagiConfig(**values))
        share = plan.rows_received.mean() / plan.layout.num_local_tokens
        yield f"| {name} | {plan.layout.chunk_size} | {plan.imbalance:.3f} | {share:.2f} |"


def stage_table() -> Iterator[str]:
    """What the forward's modes and stages do to the modelled time and to memory."""
    causal = masks.causal(TOTAL)
    yield (
        "| `MagiConfig` | packed: us a layer | exposed | buffers, MiB "
        "| causal: us a layer | exposed | buffers, MiB |"
    )
    yield "|---|---|---|---|---|---|---|"
    for label, knobs in STAGE_SETTINGS.items():
        plans = [
            make_attn_plan(m, CP_SIZE, HEADS, MagiConfig(**knobs)) for m in (_packed(), causal)
        ]
        chosen = " and ".join(dict.fromkeys(p.forward_mode for p in plans))
        shown = label if knobs else f"{label}: {chosen}"
        yield f"| {shown} | " + " | ".join(_stage_cells(p) for p in plans) + " |"


def _packed() -> AttnMask:
    return masks.from_cu_seqlens(np.cumsum([0, *LENGTHS]))


def _stage_cells(plan: AttnPlan) -> str:
    times = predict_times(plan)
    mib = receive_bytes(plan).max() / 2**20
    return f"{times.forward_us:,.0f} | {times.exposed_share:.0%} | {mib:.0f}"
