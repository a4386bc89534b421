"""How good the chosen schedules are: every number of key heads at a time beside the chosen one.

    python -m benchmarks.kernel.schedules --record schedules.json
    python -m benchmarks.kernel.schedules --directions bwd --seconds 60

A cell is timed with 1, 2, 4, ... key heads at a time, in the backward also with 1, 2 and 4 splits
of a head group, in random order in every round, below autograd; medians count. "loss" is the chosen
schedule's time over the best one's. Needs one Hopper GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.lib.cell import Case, Inputs
from benchmarks.lib.options import at_least, list_of, new_file, one_of
from benchmarks.lib.record import describe
from benchmarks.lib.timing import SPIN_CYCLES
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.kernel.backend import AttnBackend, AttnCall, GradCall
from megatron_magi.core.kernel.hopper.choice import (
    Variant,
    backward_launch,
    forward_launch,
    scratch_at,
    upload_backward,
    upload_forward,
)
from megatron_magi.core.kernel.hopper.launch_values import BwdLaunch, FwdLaunch, HeadsKey
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.kernel.widths import Widths
from megatron_magi.core.native import solver

HEADS = (
    (16, 16, Widths(192, 128)),
    (16, 16, Widths(128, 128)),
    (32, 8, Widths(128, 128)),
    (64, 8, Widths(128, 128)),
    (16, 4, Widths(256, 256)),
    (64, 8, Widths(256, 256)),
)
"""Query heads, key heads, widths."""
MASKS = ("causal", "packed_causal", "full", "packed_full", "swa1024")
MOST_SPLITS = 4
DIRECTIONS = ("fwd", "bwd")

Schedules = dict[str, AttnCall]
"""Calls by (splits and) key heads at a time; the table of each holds its launch."""


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directions", type=list_of(one_of(DIRECTIONS)), default=[*DIRECTIONS])
    parser.add_argument("--seqlens", type=list_of(at_least(1)), default=[16384, 4096, 65536])
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument(
        "--seconds", type=float, help="begin no cell after this time, of a direction"
    )
    parser.add_argument("--record", type=new_file)
    parser.add_argument("--commit", help="for the record, where there is no git")
    return parser.parse_args(argv)


def counts(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    return sorted({2**i for i in range(most.bit_length())} | {most})


def with_launch(call: AttnCall, name: tuple[Any, ...], launch: FwdLaunch | BwdLaunch) -> AttnCall:
    table = SliceTable(call.table.slices, call.table.num_q, call.table.num_k)
    table.cache[name] = launch
    return call._replace(table=table)


def forwards(call: AttnCall, key: HeadsKey) -> tuple[Schedules, str]:
    """The chosen tile with every number of heads at a time, and the chosen number."""
    chosen, table = forward_launch(call.table, key), call.table
    p = chosen.params
    variant = Variant(p.pack, p.block_m, p.block_n)
    tiling = p.block_m // p.pack, p.block_n
    work = solver.fwd_work_list(table.slices, table.num_q, table.num_k, *tiling)
    made = {str(n): upload_forward(table, key, variant, work, n) for n in counts(key.heads_kv)}
    made[str(p.heads_per_section)] = chosen
    return {n: with_launch(call, ("fwd", key), launch) for n, launch in made.items()}, str(
        p.heads_per_section
    )


def backwards(call: AttnCall, key: HeadsKey) -> tuple[Schedules, str]:
    """The chosen launch, and its list with every schedule, "splits/heads" (a part of a head: one
    split of it at a time) and "turns" if its parts take turns; and the chosen schedule."""
    table = call.table
    chosen = backward_launch(table, key, False)
    lengths = table.num_q, table.num_k
    work = solver.bwd_work_list(table.slices, *lengths, *key[:3], may_take_turns=False)
    plain, made = upload_backward(table, key, work, False), {}
    for splits in counts(min(key.heads_q // key.heads_kv, MOST_SPLITS)):
        for lanes in sorted({1} | {splits * heads for heads in counts(key.heads_kv)}):
            for turns in (False, True)[: min(splits, 2)]:
                params = type(plain.params).from_buffer_copy(plain.params)
                params.num_splits, params.lanes_per_section = splits, lanes
                params.in_turns = turns
                launch = replace(plain, params=params, scratch_at=scratch_at(params))
                made[schedule_name(launch)] = launch
    made[schedule_name(chosen)] = chosen
    name = "bwd", key, False
    schedules = {n: with_launch(call, name, launch) for n, launch in made.items()}
    return schedules, schedule_name(chosen)


def schedule_name(launch: BwdLaunch) -> str:
    p = launch.params
    words = [f"{p.num_splits}/{p.lanes_per_section / p.num_splits:g}"]
    words += ["turns"] * bool(p.in_turns)
    words += [f"after {p.whole_heads} whole heads"] * bool(p.whole_heads)
    words += [f"{p.num_items} bands"] * (p.num_items > p.num_tiles)
    return " ".join(words)


def timed(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Medians in ms."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SPIN_CYCLES)
            begin.record()
            runs[name]()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        n: statistics.median(a.elapsed_time(b) for a, b in pairs) for n, pairs in events.items()
    }


def measure(x: Inputs, case: Case, direction: str, rounds: int) -> dict[str, Any]:
    """The figures of a cell."""
    call = AttnCall(x.q, x.k, x.v, case.table, x.q.shape[2] ** -0.5)
    key, widths = HeadsKey.of(call), Widths(x.q.shape[2], x.v.shape[2])
    kernel = select_backend("cuda", x.q.device, x.q.dtype, widths)
    schedules, chosen = (forwards if direction == "fwd" else backwards)(call, key)
    ms = timed(runs_of(kernel, schedules, direction), rounds)
    return {
        "chosen": chosen, "loss": round(ms[chosen] / min(ms.values()), 3),
        "ms": {name: round(t, 4) for name, t in ms.items()},
    }  # fmt: skip


def runs_of(
    kernel: AttnBackend, schedules: Schedules, direction: str
) -> dict[str, Callable[[], object]]:
    calls = schedules.items()
    if direction == "fwd":
        return {name: partial(kernel.forward, call) for name, call in calls}
    first = next(iter(schedules.values()))
    out, lse = kernel.forward(first)
    grad = GradCall(torch.randn_like(out), lse, out=out, dtype=out.dtype)
    return {name: partial(kernel.backward, call, grad) for name, call in calls}


def cells(args: argparse.Namespace, direction: str) -> Iterator[dict[str, Any]]:
    """A row for each cell, until the time is over."""
    began = time.monotonic()
    for seqlen in args.seqlens:
        for heads_q, heads_kv, widths in HEADS:
            x = Inputs.random(seqlen, (heads_q, heads_kv), widths)
            for mask in MASKS:
                if args.seconds and time.monotonic() - began > args.seconds:
                    return
                named = {"heads": [heads_q, heads_kv], "widths": list(widths)}
                key = {"direction": direction, **named, "mask": mask, "seqlen": seqlen}
                yield {**key, **measure(x, Case(mask, seqlen), direction, args.rounds)}


def main(argv: list[str] | None = None) -> None:
    args, rows = options(argv), []
    words = sys.argv[1:] if argv is None else argv
    command = "python -m benchmarks.kernel.schedules " + " ".join(words)
    for direction in args.directions:
        for row in cells(args, direction):
            rows.append(row)
            print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            if args.record:
                record = {"meta": describe(command, args.commit), "rows": rows}
                args.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(guarded(main))
