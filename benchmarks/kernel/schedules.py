"""How good the chosen schedules are: each compared with those it was chosen from.

    python -m benchmarks.kernel.schedules --record schedules.json
    python -m benchmarks.kernel.schedules --directions bwd --head-dims 128 --masks full

A cell is timed with every schedule that the choice compares, the forward that is chosen also with
1, 2, 4, ... key heads at a time, and a backward that works on one split after another also in two
to four bands of rows, in random order in every round, below autograd; medians count. "loss" is the
chosen schedule's time over the best one's. A record is what tools.fit_schedule makes the choice
again from. Needs one Hopper GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.lib.cell import Case, Inputs
from benchmarks.lib.options import at_least, list_of, new_file, one_of
from benchmarks.lib.record import describe, write_record
from benchmarks.lib.timing import SPIN_CYCLES, in_turn
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.kernel.backend import AttnBackend, AttnCall, GradCall
from megatron_magi.core.kernel.head_dims import HeadDims
from megatron_magi.core.kernel.hopper.choice import (
    Variant,
    scratch_at,
    upload_backward,
    upload_forward,
)
from megatron_magi.core.kernel.hopper.launch_values import ChosenBackward, ChosenForward, HeadsKey
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.native import solver

HEADS = (
    (64, 8, HeadDims(64, 64)),
    (16, 16, HeadDims(192, 128)),
    (16, 16, HeadDims(128, 128)),
    (32, 8, HeadDims(128, 128)),
    (64, 8, HeadDims(128, 128)),
    (16, 4, HeadDims(256, 256)),
    (64, 8, HeadDims(256, 256)),
)
"""Query heads, key heads, widths."""
MASKS = ("causal", "packed_causal", "full", "packed_full", "swa1024", "block_sparse")
DIRECTIONS = ("fwd", "bwd", "deterministic")
QUERY_TILE = 64


class Tried(NamedTuple):
    """The schedules of a cell."""

    calls: dict[str, AttnCall]
    """By name; the table of each holds its launch."""
    chosen: str
    named: dict[str, Any]
    """What a record needs besides, so that the choice can be made again."""


class FwdSchedule(NamedTuple):
    """As csrc/schedule/forward_choice.h has it."""

    pack: int
    block_m: int
    block_n: int
    parts: int
    heads: int
    """Key heads at a time."""

    @staticmethod
    def of(choice: solver.FwdChoice) -> FwdSchedule:
        tile = choice.pack, choice.block_m, choice.block_n
        return FwdSchedule(*tile, choice.work.num_parts, choice.heads_per_section)

    def name(self) -> str:
        """Packed heads x tokens x keys, and key heads at a time."""
        tile = f"{self.pack}x{self.block_m // self.pack}x{self.block_n}/{self.heads}"
        return tile + f" in {self.parts} parts" * (self.parts > 1)


class Schedule(NamedTuple):
    """As csrc/schedule/backward_schedule.h has it."""

    splits: int
    lanes: int
    in_turns: bool = False
    whole_heads: int = 0
    band_rows: int = 0

    def name(self) -> str:
        """Splits/key heads at a time; a part of a head is one split of it at a time."""
        words = [f"{self.splits}/{self.lanes / self.splits:g}", *["turns"] * self.in_turns]
        words += [f"after {self.whole_heads} whole heads"] * bool(self.whole_heads)
        words += [f"bands of {self.band_rows}"] * bool(self.band_rows)
        return " ".join(words)


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directions", type=list_of(one_of(DIRECTIONS)), default=[*DIRECTIONS])
    parser.add_argument("--seqlens", type=list_of(at_least(1)), default=[16384, 4096, 65536])
    parser.add_argument("--masks", type=list_of(one_of(MASKS)), default=[*MASKS])
    parser.add_argument("--head-dims", type=list_of(at_least(1)), help="default: all")
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


def with_launch(
    call: AttnCall, name: tuple[Any, ...], launch: ChosenForward | ChosenBackward
) -> AttnCall:
    table = SliceTable(call.table.slices, call.table.num_q, call.table.num_k)
    table.cache[name] = launch
    return call._replace(table=table)


def forwards(call: AttnCall, key: HeadsKey) -> Tried:
    """Every tile that is compared, and the chosen one with every number of heads at a time."""
    sms = torch.cuda.get_device_properties(key.device).multi_processor_count
    lengths = call.table.num_q, call.table.num_k
    made = compared_forwards(call.table.slices, lengths, key, sms)
    calls = {}
    for s, work in made.items():
        launch = upload_forward(call.table, key, Variant(*s[:3]), work, s.heads)
        calls[s.name()] = with_launch(call, ("fwd", key), launch)
    named = {s.name(): list(s) for s in made}
    return Tried(calls, next(iter(made)).name(), {"num_sms": sms, "schedules": named})


def compared_forwards(
    slices: Any, lengths: tuple[int, int], key: HeadsKey, num_sms: int
) -> dict[FwdSchedule, solver.FwdWorkList]:
    """With their lists, the chosen one first."""
    made = solver.FwdAlternatives(slices, lengths, key[:3], num_sms).choices({})
    made.sort(key=lambda choice: choice.cost)
    best = FwdSchedule.of(made[0])
    found = {FwdSchedule.of(choice): choice.work for choice in made}
    others = {best._replace(heads=n): made[0].work for n in counts(key.heads_kv)}
    return found | {s: work for s, work in others.items() if s != best}


def backwards(call: AttnCall, key: HeadsKey, deterministic: bool) -> Tried:
    """The list with every schedule that is compared, with parts in turns and at once."""
    sms = torch.cuda.get_device_properties(key.device).multi_processor_count
    mask = call.table.slices, (call.table.num_q, call.table.num_k)
    schedules = compared(*mask, key, sms, deterministic)
    work = solver.choose_bwd(
        mask[0], *mask[1], *key[:3], sms, deterministic=deterministic, may_take_turns=False
    )
    name = "bwd", key, deterministic
    calls = {
        s.name(): with_launch(call, name, launch_of(call, key, work, s, deterministic))
        for s in schedules
    }
    named = {s.name(): list(s) for s in schedules}
    return Tried(calls, schedules[0].name(), {"num_sms": sms, "schedules": named})


def compared(
    slices: Any, lengths: tuple[int, int], key: HeadsKey, num_sms: int, deterministic: bool
) -> list[Schedule]:
    """Those that the choice compares with and without turns, the chosen one first."""
    mask = slices, *lengths, *key[:3], num_sms
    w = solver.choose_bwd(*mask, deterministic=deterministic)
    chosen = Schedule(w.num_splits, w.lanes_per_section, w.in_turns, w.whole_heads, w.band_rows)
    found = [chosen]
    for turns in (True, False):
        made = solver.BwdAlternatives(slices, lengths, key[:3], num_sms, deterministic, turns)
        found += [Schedule(*row[:5]) for row in made.timed({})[1]]
    if not deterministic:
        found += [band for each in found for band in in_bands(each, lengths[0])]
    return list(dict.fromkeys(found))


def in_bands(schedule: Schedule, num_q: int) -> Iterator[Schedule]:
    """A schedule of one split after another, in two, three and four bands of whole query tiles."""
    if not schedule.in_turns or schedule.lanes != 1 or schedule.whole_heads or schedule.band_rows:
        return
    for bands in (2, 3, 4):
        yield schedule._replace(band_rows=-(-num_q // bands // QUERY_TILE) * QUERY_TILE)


def launch_of(
    call: AttnCall,
    key: HeadsKey,
    work: solver.BwdWorkList,
    schedule: Schedule,
    deterministic: bool,
) -> ChosenBackward:
    """A plain list's launch with another schedule."""
    if schedule.band_rows:
        work = work.in_bands(schedule.band_rows)
    launch = upload_backward(call.table, key, work, deterministic)
    p = launch.params
    p.num_splits, p.lanes_per_section, p.in_turns, p.whole_heads = schedule[:4]
    return replace(launch, scratch_at=scratch_at(p))


def timed(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Medians in ms."""
    for run in runs.values():
        run()
    times = in_turn({name: [run] for name, run in runs.items()}, rounds, SPIN_CYCLES)
    return {name: statistics.median(ms) for name, ms in times.items()}


def measure(x: Inputs, case: Case, direction: str, rounds: int) -> dict[str, Any]:
    """The figures of a cell."""
    call = AttnCall(x.q, x.k, x.v, case.table, x.q.shape[2] ** -0.5)
    key, widths = HeadsKey.of(call), HeadDims(x.q.shape[2], x.v.shape[2])
    kernel = select_backend("cuda", x.q.device, x.q.dtype, widths)
    exact = direction == "deterministic"
    tried = forwards(call, key) if direction == "fwd" else backwards(call, key, exact)
    ms = timed(runs_of(kernel, tried.calls, direction), rounds)
    return {
        "chosen": tried.chosen, "loss": round(ms[tried.chosen] / min(ms.values()), 3),
        "ms": {name: round(t, 4) for name, t in ms.items()}, **tried.named,
    }  # fmt: skip


def runs_of(
    kernel: AttnBackend, calls: dict[str, AttnCall], direction: str
) -> dict[str, Callable[[], object]]:
    if direction == "fwd":
        return {name: partial(kernel.forward, call) for name, call in calls.items()}
    first = next(iter(calls.values()))
    out, lse = kernel.forward(first)
    exact = direction == "deterministic"
    dout = torch.randn_like(out)
    grad = GradCall(dout, lse, out=out, dtype=out.dtype, deterministic=exact)
    return {name: partial(kernel.backward, call, grad) for name, call in calls.items()}


def cells(args: argparse.Namespace, direction: str) -> Iterator[dict[str, Any]]:
    """A row for each cell, until the time is over."""
    began = time.monotonic()
    for seqlen in args.seqlens:
        for heads_q, heads_kv, widths in HEADS:
            if args.head_dims and widths.head_dim not in args.head_dims:
                continue
            x = Inputs.random(seqlen, (heads_q, heads_kv), widths)
            for mask in args.masks:
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
            write_record(args.record, describe(command, args.commit), rows)


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
