"""How many key heads the forward should walk together: every number beside the chosen one.

    python scripts/bench_sections.py --record sections.json

Each cell times the chosen tile with 1, 2, 4, ... key heads in a section, in random order in every
round, below autograd; medians count. "loss" is the chosen number's time over the best one's. Needs
one Hopper GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_kernel_cell import Case, Inputs
from bench_kernel_record import describe
from bench_kernel_timing import SPIN_CYCLES

from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.hopper.choice import Variant, forward_launch, upload_forward
from megatron_magi.core.kernel.hopper.forward import launch_forward
from megatron_magi.core.kernel.hopper.launch import FwdLaunch, HeadsKey, out_shape
from megatron_magi.core.kernel.widths import Widths
from megatron_magi.core.native import solver

HEADS = (
    (16, 16, Widths(192, 128)),
    (16, 16, Widths(128, 128)),
    (32, 8, Widths(128, 128)),
    (16, 4, Widths(256, 256)),
)
"""Query heads, key heads, widths."""
MASKS = ("causal", "packed_causal", "full", "packed_full", "swa1024")


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seqlens", default="16384,4096,65536")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, help="begin no cell after this time")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--commit", help="for the record, where there is no git")
    return parser.parse_args(argv)


def launches(call: AttnCall, key: HeadsKey) -> tuple[dict[int, FwdLaunch], int]:
    """The chosen tile's launch by heads in a section, and the chosen number."""
    chosen = forward_launch(call.table, key)
    p, table = chosen.params, call.table
    variant = Variant(p.pack, p.block_m, p.block_n)
    tiling = p.block_m // p.pack, p.block_n
    work = solver.fwd_work_list(table.slices, table.num_q, table.num_k, *tiling)
    counts = {2**i for i in range(key.heads_kv.bit_length())} | {key.heads_kv}
    made = {n: upload_forward(table, key, variant, work, n) for n in sorted(counts)}
    return made | {p.heads_per_section: chosen}, p.heads_per_section


def measure(x: Inputs, case: Case, rounds: int) -> dict[str, Any]:
    """Medians in ms by heads in a section."""
    call = AttnCall(x.q, x.k, x.v, case.table, x.q.shape[2] ** -0.5)
    made, chosen = launches(call, HeadsKey.of(call))
    result = x.q.new_empty(out_shape(call)), x.q.new_empty(x.q.shape[:2], dtype=torch.float32)
    events: dict[int, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in made}
    for launch in made.values():
        launch_forward(launch, call, result)
    for _ in range(rounds):
        for n in random.sample(list(made), len(made)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SPIN_CYCLES)
            begin.record()
            launch_forward(made[n], call, result)
            end.record()
            events[n].append((begin, end))
    torch.cuda.synchronize()
    ms = {n: statistics.median(a.elapsed_time(b) for a, b in pairs) for n, pairs in events.items()}
    return {
        "tile": [made[chosen].params.block_m, made[chosen].params.block_n],
        "chosen": chosen, "loss": round(ms[chosen] / min(ms.values()), 3),
        "ms": {str(n): round(t, 4) for n, t in ms.items()},
    }  # fmt: skip


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each cell, until the time is over."""
    began = time.monotonic()
    for seqlen in map(int, args.seqlens.split(",")):
        for heads_q, heads_kv, widths in HEADS:
            x = Inputs.random(seqlen, (heads_q, heads_kv), widths)
            for mask in MASKS:
                if args.seconds and time.monotonic() - began > args.seconds:
                    return
                named = {"heads": [heads_q, heads_kv], "widths": list(widths)}
                key = {**named, "mask": mask, "seqlen": seqlen}
                yield {**key, **measure(x, Case(mask, seqlen), args.rounds)}


def main(argv: list[str] | None = None) -> None:
    args, rows = options(argv), []
    command = "python scripts/bench_sections.py " + " ".join(sys.argv[1:] if argv is None else argv)
    for row in cells(args):
        rows.append(row)
        print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if args.record:
            record = {"meta": describe(command, args.commit), "rows": rows}
            args.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(guarded(main))
