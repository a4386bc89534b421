"""What equal bits from run to run cost the backward: ours with and without, beside its peers with.

    python -m benchmarks.kernel.deterministic --record deterministic.json

"ours" adds gradients in any order; the others are deterministic. "same_bits" of a row says whether
repeated backwards of it had equal bits, as "ours" need not. All are run through autograd, in random
order in every round; medians count, ratios are to "ours". Columns are what can be imported. Needs
one Hopper GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.kernel.peers import all_peers
from benchmarks.kernel.speed import INPUT_SETS, run_cell
from benchmarks.lib.cell import Call, Case, Direction, Inputs, Level, Peer
from benchmarks.lib.options import at_least, new_file
from benchmarks.lib.record import describe
from benchmarks.lib.timing import Budget, row, time_calls
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.kernel.widths import Widths

HEADS = (64, 8)
WIDTHS = Widths(128, 128)
MASKS = ("full", "causal", "packed_causal", "packed_full", "swa1024", "prefix_tree")
LENGTHS = (4096, 16384)
PEERS = ("fa3", "fa4", "ffa")
SUFFIX = "_deterministic"
REPEATS = 3


class Deterministic:
    """A peer of which gradients with equal bits are asked."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.levels: tuple[Level, ...] = peer.levels

    def missing(self) -> str | None:
        return self.peer.missing()

    def refuses(self, case: Case, direction: Direction) -> str | None:
        return self.peer.refuses(replace(case, deterministic=True), direction)

    def call(self, case: Case, direction: Direction, x: Inputs) -> Call:
        return self.peer.call(replace(case, deterministic=True), direction, x)


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=at_least(1), default=15)
    parser.add_argument("--cell-seconds", type=float, default=1.0, help="to spend on a cell, about")
    parser.add_argument("--record", type=new_file)
    parser.add_argument("--commit", help="for the record, where there is no git")
    return parser.parse_args(argv)


def columns() -> dict[str, Peer]:
    """Ours twice, and what can be imported of the others; what cannot says why."""
    known = all_peers()
    found = {"ours": known["ours"], "ours" + SUFFIX: Deterministic(known["ours"])}
    for name in PEERS:
        reason = known[name].missing()
        if reason is None:
            found[name + SUFFIX] = Deterministic(known[name])
        else:
            print(f"no column {name}: {reason}", file=sys.stderr)
    return found


def same_bits(call: Call) -> bool:
    first = call()
    again = [call() for _ in range(REPEATS - 1)]
    return all(torch.equal(a, b) for made in again for a, b in zip(made, first, strict=True))


def measure(
    peers: dict[str, Peer], case: Case, inputs: list[Inputs], budget: Budget
) -> list[dict[str, Any]]:
    """Rows of one cell: figures of the backward, and its time over that of "ours"."""
    able, left_out = run_cell(peers, case, "bwd", inputs)
    for name, reason in left_out.items():
        print(f"{case.seqlen:7d} {case.name:15s} without {name}: {reason}", file=sys.stderr)
    times = time_calls(able, budget) if able else {}
    flops = case.flops(HEADS[0], WIDTHS, "bwd")
    key = {"mask": case.name, "seqlen": case.seqlen, "direction": "bwd"}
    rows: list[dict[str, Any]] = [
        {**key, "impl": name, **row(flops, ms), "same_bits": same_bits(able[name].calls[0])}
        for name, ms in times.items()
    ]
    fast = {r["impl"]: r["ms"] for r in rows}.get("ours")
    return [{**r, "ratio": round(r["ms"] / fast, 4) if fast else None} for r in rows]


def unfit(rows: list[dict[str, Any]]) -> list[str]:
    """What must not be of ours in a cell: a column missing, or bits that differ between runs."""
    found = {r["impl"]: r["same_bits"] for r in rows}
    lacking = [f"no {name}" for name in ("ours", "ours" + SUFFIX) if name not in found]
    equal = found.get("ours" + SUFFIX, True)
    return lacking if equal else [*lacking, f"ours{SUFFIX} has other bits in another run"]


def shown(row: dict[str, Any]) -> str:
    bits = "" if row["same_bits"] else ", other bits"
    return f"{row['impl']} {row['ms']} ms ({row['ratio']}{bits})"


def cells() -> Iterator[tuple[Case, list[Inputs]]]:
    for seqlen in LENGTHS:
        inputs = [Inputs.random(seqlen, HEADS, WIDTHS) for _ in range(INPUT_SETS)]
        yield from ((Case(name, seqlen), inputs) for name in MASKS)


def main(argv: list[str] | None = None) -> int:
    """Run the cells, print a line each, write the record; 1 if something was unfit."""
    argv = sys.argv[1:] if argv is None else argv
    args, rows, failed = options(argv), [], False
    peers, budget = columns(), Budget(args.rounds, args.cell_seconds)
    meta = describe(" ".join(["python -m benchmarks.kernel.deterministic", *argv]), args.commit)
    for case, inputs in cells():
        found = measure(peers, case, inputs, budget)
        rows += found
        print(f"{case.seqlen:7d} {case.name:15s}", "  ".join(map(shown, found)), flush=True)
        for reason in unfit(found):
            failed = True
            print(f"{case.seqlen:7d} {case.name:15s} {reason}", file=sys.stderr, flush=True)
        if args.record:
            args.record.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(guarded(main))
