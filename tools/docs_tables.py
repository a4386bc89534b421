"""Numbers and screens in the docs, computed by the planner and the command line, never typed.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``; a screen is the indented block
after ``<!-- screen ARGUMENTS -->``. ``# FIRST:LAST`` after the arguments shows only these lines.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import numpy as np

from megatron_magi import AttnMask, CostTable, MagiConfig, masks
from megatron_magi.cli import main as command_line
from megatron_magi.core.plan import make_attn_plan, predict_times
from megatron_magi.viz.plan_facts import receive_bytes
from tools.docs_figures import HEADS, packed_lengths
from tools.docs_text import fill_tables
from tools.record_table import Row, markdown

ROOT = Path(__file__).parents[1]
TOTAL, CP_SIZE = 131072, 8
PACKED = masks.from_cu_seqlens(np.cumsum([0, *packed_lengths(TOTAL, seed=5)]))
CHUNK_SETTINGS = (
    "",
    "chunk_size=512",
    "chunk_size=512, costs=CostTable(swap_trials=0)",
    *(f"chunk_size=512, max_imbalance={most}" for most in (1.05, 1.2)),
)
STAGE_SETTINGS = (
    "",
    *(f'forward_mode="{mode}"' for mode in ("at_once", "local_first")),
    *(f'forward_mode="staged", overlap_degree={n}' for n in (1, 4)),
)
"""Arguments of MagiConfig."""


def update_page(page: Path) -> None:
    """Rewrite the page's tables and screens in place."""
    text = fill_tables(page.read_text(), {"chunks": chunk_table, "stages": stage_table})
    screen = r"(<!-- screen (.*?) -->\n)((?:    .*\n|\n(?=    ))+)"
    page.write_text(re.sub(screen, lambda m: m[1] + _screen(m[2]), text))


def _screen(arguments: str) -> str:
    """Lines that the command prints here, without the folder of this checkout."""
    arguments, _, part = arguments.partition(" # ")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command_line(arguments.split())
    lines = printed.getvalue().replace(str(ROOT), "CHECKOUT").rstrip().splitlines()
    first, last = (int(end) if end else None for end in (part or ":").split(":"))
    before, after = ["..."] * bool(first), ["..."] * bool(last)
    shown = [f"$ megatron-magi {arguments}", *before, *lines[first:last], *after]
    return "".join(f"    {line}".rstrip() + "\n" for line in shown)


def chunk_table() -> list[str]:
    """Balance and traffic by chunk size and load cap."""
    return markdown(
        "setting | chunk | max/mean load | rows received / rows owned",
        "{name} | {plan.layout.chunk_size} | {plan.imbalance:.3f} | {received:.2f}",
        [_row(settings, PACKED) for settings in CHUNK_SETTINGS],
    )


def stage_table() -> list[str]:
    """The forward's modelled time and its memory by mode and stages."""
    rows = []
    for settings in STAGE_SETTINGS:
        packed, causal = (_row(settings, mask) for mask in (PACKED, masks.causal(TOTAL)))
        chosen = " and ".join(dict.fromkeys(row["plan"].forward_mode for row in (packed, causal)))
        name = packed["name"] if settings else f"default: {chosen}"
        rows.append({"name": name, "packed": packed, "causal": causal})
    return markdown(
        "`MagiConfig` | packed: us a layer | exposed | buffers, MiB "
        "| causal: us a layer | exposed | buffers, MiB",
        "{name} | {packed[times]} | {causal[times]}",
        rows,
    )


def _row(settings: str, mask: AttnMask) -> Row:
    """Facts of the plan with settings as a user writes them."""
    config = eval(f"MagiConfig({settings})", {"MagiConfig": MagiConfig, "CostTable": CostTable})
    plan = make_attn_plan(mask, CP_SIZE, HEADS, config)
    times, mib = predict_times(plan), receive_bytes(plan).max() / 2**20
    return {
        "name": f"`{settings}`" if settings else "default",
        "plan": plan,
        "received": plan.rows_received.mean() / plan.layout.num_local_tokens,
        "times": f"{times.forward_us:,.0f} | {times.exposed_share:.0%} | {mib:.0f}",
    }
