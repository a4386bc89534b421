"""Bytes that attention moves, forward and backward, with keys alone and with queries too.

    python -m benchmarks.planner.sent_queries [--out benchmarks/records/....json]
    python -m benchmarks.planner.sent_queries --table benchmarks/records/....json

No device is timed: the planner computes all figures.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.lib.options import new_file
from benchmarks.lib.record import Record, record_of
from benchmarks.planner.plans import meta
from megatron_magi import AttnMask, MagiConfig, PrefixTree, masks
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.plan import AttnPlan, HeadShape, contiguous_layout, make_attn_plan
from megatron_magi.core.plan.query_stage import key_row_bytes

GQA, MHA = HeadShape(64, 8, 128), HeadShape(16, 16, 128)
EVERYTHING = -(2**31), 2**31 - 1


def cross(num_q: int, num_k: int) -> AttnMask:
    """Every query sees every key."""
    return AttnMask([[0, num_q, 0, num_k, *EVERYTHING]], num_q, num_k)


CASES: dict[str, AttnMask] = {
    "causal 64K": masks.causal(65536),
    "causal 64K, contiguous": masks.causal(65536),
    "tree, 64K and 8 x 1K": PrefixTree.of_answers(65536, [1024] * 8).mask(),
    "cross, 2K queries on 128K keys": cross(2048, 131072),
    "cross, 16K queries on 128K keys": cross(16384, 131072),
    "cross, 64K queries on 512 keys": cross(65536, 512),
}


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=new_file)
    parser.add_argument("--table", type=Path, help="print the Markdown table of a record")
    options = parser.parse_args()
    if options.table:
        record = record_of(options.table, "benchmarks.planner.sent_queries", ("mask", "gqa"))
        print("\n".join(table(record["rows"])))
        return 0
    rows = [row(name, cp_size) for name in CASES for cp_size in (4, 8)]
    print("\n".join(table(rows)))
    if options.out:
        record = Record(options.out, {**meta(), "gqa": str(GQA), "mha": str(MHA), "units": "bytes"})
        record.rows = rows
        record.write()
    return 0


def row(name: str, cp_size: int) -> dict[str, Any]:
    """Bytes of all ranks and the highest load over the mean, for both head shapes."""
    made: dict[str, Any] = {"mask": name, "cp_size": cp_size}
    for heads, shape in (("gqa", GQA), ("mha", MHA)):
        for sends in (False, True):
            began = time.perf_counter()
            plan = planned(name, cp_size, shape, sends)
            made[f"{heads}{', queries too' if sends else ''}"] = {
                "bytes": sum(sent_bytes(plan)),
                "imbalance": plan.imbalance,
                "seconds_to_plan": time.perf_counter() - began,
            }
    return made


def planned(name: str, cp_size: int, shape: HeadShape, sends: bool) -> AttnPlan:
    mask, config = CASES[name], MagiConfig(send_queries=sends)
    layout = None
    if "contiguous" in name:
        layout = contiguous_layout(mask.total_seqlen_q, cp_size, config)
    return make_attn_plan(mask, cp_size, shape, config, layout=layout)


def sent_bytes(plan: AttnPlan) -> tuple[int, int]:
    """Of keys and of queries, forward and backward, all ranks."""
    rows = [int((x[:, 4] - x[:, 3]).sum()) for x in (plan.transfers, plan.query_transfers)]
    shape = plan.head_shape
    return rows[0] * key_row_bytes(shape, plan.config), rows[1] * shape.query_row_bytes


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown, in MiB, with the highest load over the mean in brackets."""
    lines = [
        "| mask | ranks | 64/8 heads, keys alone | queries too | 16/16 heads, keys alone | "
        "queries too |",
        "|---|---|---|---|---|---|",
    ]
    names = ("gqa", "gqa, queries too", "mha", "mha, queries too")
    for r in rows:
        cells = [f"{r[n]['bytes'] / 2**20:,.0f} ({r[n]['imbalance']:.2f})" for n in names]
        lines.append(f"| {r['mask']} | {r['cp_size']} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
