"""What softcap costs the Hopper kernels: attention with and without it, below autograd.

    python -m benchmarks.kernel.softcap --record softcap.json

Queries are multiplied by each of --sizes, which is then the standard deviation of the scaled
scores; with a size like softcap many logits are near the cap. Calls with and without softcap attend
to the same tensors, in random order in every round; medians count. "deterministic" is the backward
of that mode. Needs one Hopper GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.kernel.peers import Ours
from benchmarks.lib.cell import Case, Direction, Inputs
from benchmarks.lib.record import describe
from benchmarks.lib.timing import Budget, ready, time_calls
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.kernel.widths import COMPILED_WIDTHS, Widths

HEADS = {64: (64, 8), 96: (64, 8), 128: (64, 8), 192: (16, 16), 256: (16, 4)}
"""Query and key/value heads, by head_dim."""
DIRECTIONS: dict[str, tuple[Direction, bool]] = {
    "fwd": ("fwd", False), "bwd": ("bwd", False), "deterministic": ("bwd", True),
}  # fmt: skip
"""Of a row: the call's, and whether it is deterministic."""
WITHOUT, WITH = "without", "softcap"


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--softcap", type=float, default=30.0)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.0, 8.0, 30.0])
    dims = [widths.head_dim for widths in COMPILED_WIDTHS]
    parser.add_argument("--head-dims", type=int, nargs="+", default=dims, choices=dims)
    parser.add_argument("--masks", nargs="+", default=["full", "causal"])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[16384])
    parser.add_argument("--directions", nargs="+", default=list(DIRECTIONS), choices=DIRECTIONS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cell-seconds", type=float, default=1.0, help="of a direction of a cell")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--commit", help="for the record, where there is no git")
    return parser.parse_args(argv)


def cells(args: argparse.Namespace) -> Iterator[tuple[Widths, float, Case, str, Inputs]]:
    for widths in COMPILED_WIDTHS:
        if widths.head_dim not in args.head_dims:
            continue
        for seqlen in args.seqlens:
            normal = Inputs.random(seqlen, HEADS[widths.head_dim], widths)
            for size in args.sizes:
                x = normal.of_size(size)
                for name in args.masks:
                    for direction in args.directions:
                        yield widths, size, Case(name, seqlen, "op"), direction, x


def measure(
    case: Case, softcap: float, direction: str, x: Inputs, budget: Budget
) -> dict[str, list[float]]:
    """Milliseconds of every round, without and with softcap."""
    which, deterministic = DIRECTIONS[direction]
    asked = {
        name: replace(case, softcap=cap, deterministic=deterministic)
        for name, cap in ((WITHOUT, 0.0), (WITH, softcap))
    }
    calls = {name: Ours().call(one, which, x) for name, one in asked.items()}
    return time_calls({name: ready([call] * 2) for name, call in calls.items()}, budget)


def row_of(times: dict[str, list[float]], flops: float) -> dict[str, Any]:
    """Medians, spread, and what softcap costs: the ratio of the medians."""
    ms = {name: statistics.median(t) for name, t in times.items()}
    figures = {
        name: {
            "tflops": round(flops / ms[name] / 1e9, 1), "ms": round(ms[name], 4),
            "min_ms": round(min(t), 4), "max_ms": round(max(t), 4),
        }
        for name, t in times.items()
    }  # fmt: skip
    ratio = round(ms[WITH] / ms[WITHOUT], 4)
    return {**figures, "ratio": ratio, "n": len(times[WITH])}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args, rows = options(argv), []
    meta = describe(" ".join(["python -m benchmarks.kernel.softcap", *argv]), args.commit)
    meta = {**meta, "softcap": args.softcap, "level": "op"}
    for widths, size, case, direction, x in cells(args):
        heads = HEADS[widths.head_dim]
        budget = Budget(args.rounds, args.cell_seconds)
        times = measure(case, args.softcap, direction, x, budget)
        found = row_of(times, case.flops(heads[0], widths, DIRECTIONS[direction][0]))
        key = {
            "head_dim": widths.head_dim, "value_dim": widths.value_dim, "heads": heads,
            "size": size, "mask": case.name, "seqlen": case.seqlen, "direction": direction,
        }  # fmt: skip
        rows.append({**key, **found})
        tflops = [f"{found[name]['tflops']:.0f}" for name in (WITHOUT, WITH)]
        print(*list(key.values())[3:], widths.head_dim, *tflops, found["ratio"], flush=True)
        if args.record:
            args.record.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
