"""What the largest logits cost the Hopper forward: the same call with and without them.

    python -m benchmarks.kernel.max_logits --record max_logits.json

Both are run in random order in every round, below autograd; medians count. Needs one Hopper GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from typing import Any

import torch

from benchmarks.lib.cell import Case, Inputs
from benchmarks.lib.options import at_least, new_file
from benchmarks.lib.record import describe
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.kernel.attention import no_logits
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.kernel.widths import COMPILED_WIDTHS, Widths

HEADS = {64: (64, 8), 96: (32, 8), 128: (64, 8), 192: (16, 16), 256: (16, 4)}
"""Query and key/value heads, by head_dim."""
MASKS = ("full", "causal", "packed_causal")
WARM_UP = 4


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seqlen", type=at_least(1), default=16384)
    parser.add_argument("--rounds", type=at_least(1), default=30)
    parser.add_argument("--record", type=new_file)
    parser.add_argument("--commit", help="for the record, where there is no git")
    return parser.parse_args(argv)


def measure(name: str, widths: Widths, args: argparse.Namespace) -> dict[str, Any]:
    """One row: medians in ms without and with the largest logits, and their ratio."""
    heads = HEADS[widths.head_dim]
    x, case = Inputs.random(args.seqlen, heads, widths), Case(name, args.seqlen)
    plain = AttnCall(x.q, x.k, x.v, case.table, widths.head_dim**-0.5)
    most = no_logits(x.q)
    calls = {"plain": plain, "max_logits": plain._replace(max_logits=most)}
    kernel = select_backend("cuda", x.q.device, x.q.dtype, widths)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds + WARM_UP):
        for which in random.sample(list(calls), 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            most.copy_(no_logits(x.q))  # a call knows nothing of the one before
            begin.record()
            kernel.forward(calls[which])
            end.record()
            end.synchronize()
            times[which].append(begin.elapsed_time(end))
    ms = {which: statistics.median(t[WARM_UP:]) for which, t in times.items()}
    ratio = ms["max_logits"] / ms["plain"]
    key = {"mask": name, "seqlen": args.seqlen, "heads": heads, "widths": widths}
    return {**key, "ms": ms, "ratio": ratio, "n": args.rounds}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args, rows = options(argv), []
    for widths in COMPILED_WIDTHS:
        for name in MASKS:
            rows.append(measure(name, widths, args))
            print(f"{widths.head_dim:4d} {name:15s} {rows[-1]['ratio']:.4f}", flush=True)
    if args.record:
        meta = describe("python -m benchmarks.kernel.max_logits", args.commit)
        args.record.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
