"""What limits a long kernel: its speed beside the card's clock, power and reasons to slow down.

    python -m benchmarks.kernel.power --impls ours,cudnn,fa3,fa4 --record power.json

Each implementation runs alone for some seconds, in random order, round after round, while
nvidia-smi samples the card. "of peak" is the share of the tensor cores' work at the clock that was
sampled, 4,096 FLOPs a clock and processor, so a kernel with a larger share does more in a clock,
and one with a higher clock takes less power for it. "gemm" is a square product of 8,192, the
reference for what the card can do. Needs one Hopper GPU and nvidia-smi.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from benchmarks.kernel.speed import importable, prepare
from benchmarks.lib.cell import DEFAULT_LEVEL, Call, Case, Direction, Inputs
from benchmarks.lib.options import at_least, new_file
from benchmarks.lib.record import describe
from benchmarks.lib.timing import Ready
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.kernel.widths import Widths

FLOPS_PER_CLOCK = 4096
"""Of the tensor cores of one processor, for 16-bit operands."""
GEMM = 8192
SAMPLE_MS = 20
FIELDS = "clocks.sm,power.draw.instant,clocks_throttle_reasons.sw_power_cap"


class Samples(NamedTuple):
    """What nvidia-smi saw while one implementation ran."""

    clocks_mhz: list[float]
    watts: list[float]
    capped: list[bool]
    """Whether the power limit lowered the clock."""


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--impls", default="ours,cudnn,fa3,fa4")
    parser.add_argument("--masks", default="full,causal")
    parser.add_argument("--seqlens", default="16384,65536")
    parser.add_argument("--direction", choices=["fwd", "bwd"], default="bwd")
    parser.add_argument("--rounds", type=at_least(1), default=2)
    parser.add_argument("--run-seconds", type=float, default=1.5, help="of one implementation")
    parser.add_argument("--record", type=new_file)
    parser.add_argument("--commit", help="for the record, where there is no git")
    args = parser.parse_args(argv)
    args.level, args.flex_seqlens, args.impls = DEFAULT_LEVEL, None, args.impls.split(",")
    return args


@contextmanager
def sampled() -> Iterator[list[Samples]]:
    """Samples of the block's time, in a list that is filled at its end."""
    found: list[Samples] = []
    query = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    with tempfile.TemporaryFile("w+") as out:
        smi = subprocess.Popen([*query, f"-lms={SAMPLE_MS}", "-i=0"], stdout=out)
        try:
            yield found
        finally:
            smi.terminate()
            smi.wait()
        out.seek(0)
        found.append(parse(out.read()))


def parse(text: str) -> Samples:
    """nvidia-smi's lines; the first tenth, in which the clock settles, and a line that was cut off
    at the end do not count."""
    lines = [line.split(", ") for line in text.splitlines()]
    lines = [line for line in lines if len(line) == FIELDS.count(",") + 1]
    lines = lines[len(lines) // 10 :]
    return Samples(
        [float(line[0]) for line in lines],
        [float(line[1]) for line in lines],
        [line[2] == "Active" for line in lines],
    )


def run(calls: list[Call], seconds: float) -> tuple[float, Samples]:
    """Milliseconds of a call, back to back for some seconds, and what was sampled meanwhile."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    calls[0]()
    torch.cuda.synchronize()
    with sampled() as found:
        count, end = 0, time.monotonic() + seconds
        events[0].record()
        while time.monotonic() < end:
            for call in calls:
                call()
            count += len(calls)
            torch.cuda.synchronize()  # the pause is microseconds in milliseconds of work
        events[1].record()
        events[1].synchronize()
    return events[0].elapsed_time(events[1]) / count, found[0]


def gemm() -> Call:
    a, b = (torch.randn(GEMM, GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: (torch.mm(a, b, out=out),)


def row(flops: float, runs: list[tuple[float, Samples]], num_sms: int) -> dict[str, Any]:
    """The figures of one implementation, medians over its runs and samples."""
    ms = statistics.median(ms for ms, _ in runs)
    clocks = [mhz for _, s in runs for mhz in s.clocks_mhz]
    watts = [w for _, s in runs for w in s.watts]
    capped = [c for _, s in runs for c in s.capped]
    tflops, mhz, power = flops / ms / 1e9, statistics.median(clocks), statistics.median(watts)
    peak = num_sms * FLOPS_PER_CLOCK * mhz / 1e6
    return {
        "tflops": round(tflops, 1), "ms": round(ms, 3), "clock_mhz": mhz, "watts": power,
        "of_peak": round(tflops / peak, 3), "pj_per_flop": round(power / tflops, 3),
        "power_capped": round(sum(capped) / len(capped), 2), "samples": len(clocks),
    }  # fmt: skip


def candidates(
    args: argparse.Namespace, case: Case, peers: dict[str, Any]
) -> dict[str, tuple[list[Call], float]]:
    """Every implementation that can do a cell: its calls and its FLOPs. The others are named."""
    direction: Direction = args.direction
    inputs = [Inputs.random(case.seqlen, (64, 8), Widths(128, 128))]
    flops = case.flops(64, Widths(128, 128), direction)
    found: dict[str, tuple[list[Call], float]] = {"gemm": ([gemm()], 2.0 * GEMM**3)}
    for name, peer in peers.items():
        made = prepare(peer, case, direction, inputs)
        if isinstance(made, Ready):
            found[name] = made.calls, flops
        else:
            print(f"{case.name} {case.seqlen} without {name}: {made}", file=sys.stderr)
    return found


def measure(args: argparse.Namespace, case: Case, peers: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a cell."""
    found = candidates(args, case, peers)
    runs: dict[str, list[tuple[float, Samples]]] = {name: [] for name in found}
    for _ in range(args.rounds):
        for name in random.sample(list(found), len(found)):
            runs[name].append(run(found[name][0], args.run_seconds))
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    cell = {"mask": case.name, "seqlen": case.seqlen, "direction": args.direction}
    return [
        {**cell, "impl": name, **row(flops, runs[name], num_sms)}
        for name, (_, flops) in found.items()
    ]


def main(argv: list[str] | None = None) -> None:
    args = options(argv)
    peers, rows = importable(args), []
    command = "python -m benchmarks.kernel.power " + " ".join(
        sys.argv[1:] if argv is None else argv
    )
    for seqlen in map(int, args.seqlens.split(",")):
        for mask in args.masks.split(","):
            for made in measure(args, Case(mask, seqlen, args.level), peers):
                rows.append(made)
                print(" ".join(f"{key} {value}" for key, value in made.items()), flush=True)
            if args.record:
                record = {"meta": describe(command, args.commit), "rows": rows}
                args.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(guarded(main))
