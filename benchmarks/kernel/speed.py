"""Speed of the attention kernels and their peers, all in one process, interleaved.

    python -m benchmarks.kernel.speed              # 16k: all masks, both directions, all peers
    python -m benchmarks.kernel.speed --masks causal,swa1024 --seqlens 8192,65536 --impls ours,fa3
    python -m benchmarks.kernel.speed --directions bwd --seconds 240 --record kernel.json
    python -m benchmarks.kernel.speed --head-dim 192 --value-dim 128 --heads 16,16 --impls ours,fa3
    python -m benchmarks.kernel.speed --softcap 30 --impls ours,fa3,fa4

Columns are what can be imported of: ours, ours_fa4 and ours_flex (our masks through
FlashAttention-4 and FlexAttention), cudnn, flex, fa2, fa3, fa4, ffa; what is left out says why.
TFLOP/s count the visible area only: forward 4 * area * head_dim * heads, backward 2.5 times that
(--value-dim: each product with its own width).
Every round runs each implementation once, in random order, on one of several input sets in turn;
the median counts. All are timed through a differentiable function and its torch.autograd.grad. An
implementation whose outputs are not those of the first is left out. A row has the clock and the
power at the end of its cell.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.kernel.compile import compile_ahead
from benchmarks.kernel.peers import all_peers
from benchmarks.lib.board import board_state
from benchmarks.lib.cell import Case, Direction, Inputs, Peer
from benchmarks.lib.masks import MASKS
from benchmarks.lib.options import at_least, head_counts, list_of, new_file, one_of
from benchmarks.lib.record import Record, describe, slower
from benchmarks.lib.timing import (
    MOST_DIFFERENCE,
    Budget,
    Ready,
    difference,
    ready,
    row,
    time_calls,
)
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.kernel.head_dims import HeadDims

INPUT_SETS = 2
DIFFERS = "its outputs differ from those"


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n")[0])
    names, numbers = list_of(str), list_of(at_least(1))
    parser.add_argument("--masks", type=list_of(one_of(list(MASKS))), default=list(MASKS))
    parser.add_argument("--seqlens", type=numbers, default=[16384])
    parser.add_argument("--impls", type=names, help="default: all")
    parser.add_argument(
        "--directions", type=list_of(one_of(("fwd", "bwd"))), default=["fwd", "bwd"]
    )
    parser.add_argument("--heads", type=head_counts, default=[64, 8], help="query, key/value heads")
    parser.add_argument("--head-dim", type=at_least(1), default=128)
    parser.add_argument(
        "--value-dim", type=at_least(1), help="of values, if not as wide as queries and keys"
    )
    parser.add_argument("--softcap", type=float, default=0.0, help="of the logits; 0: none")
    parser.add_argument("--rounds", type=at_least(1), default=7, help="at most; never fewer than 3")
    parser.add_argument("--cell-seconds", type=float, default=3.0, help="to spend on rounds, about")
    parser.add_argument("--seconds", type=float, help="begin no cell after this time")
    parser.add_argument(
        "--compile-jobs", type=at_least(0), default=0, help="compile flex ahead, in so many"
    )
    parser.add_argument("--record", type=new_file, help="write a JSON record, after every cell")
    parser.add_argument("--append", action="store_true", help="keep the record's other cells")
    parser.add_argument("--commit", help="for the record, where there is no git")
    parser.add_argument("--compare", type=Path, help="print what got over 15 %% slower than there")
    return parser.parse_args(argv)


def widths(args: argparse.Namespace) -> HeadDims:
    return HeadDims(args.head_dim, args.value_dim or args.head_dim)


def prepare(peer: Peer, case: Case, direction: Direction, inputs: list[Inputs]) -> Ready | str:
    """Ready to be timed; or why not."""
    reason = peer.refuses(case, direction)
    if reason is not None:
        return reason
    try:
        return ready([peer.call(case, direction, x) for x in inputs])
    except Exception as error:  # a peer that cannot run a cell must not end the run
        return f"{type(error).__name__}: {str(error)[:300]}"


def run_cell(
    peers: dict[str, Peer], case: Case, direction: Direction, inputs: list[Inputs]
) -> tuple[dict[str, Ready], dict[str, str]]:
    """Those that can, with the outputs of the first; why the others cannot."""
    able: dict[str, Ready] = {}
    left_out: dict[str, str] = {}
    for name, peer in peers.items():
        made = prepare(peer, case, direction, inputs)
        if isinstance(made, Ready) and able:
            first = next(iter(able))
            off = difference(made.outputs, able[first].outputs)
            if not off < MOST_DIFFERENCE:
                made = f"{DIFFERS} of {first} by {off:.1e}"
        if isinstance(made, Ready):
            able[name] = made
        else:
            left_out[name] = made
    return able, left_out


def importable(args: argparse.Namespace) -> dict[str, Peer]:
    """The implementations asked for; what is not there is said once.

    Raises:
        SystemExit: a name that is not known.
    """
    known = all_peers()
    if unknown := set(args.impls or ()) - set(known):
        raise SystemExit(f"--impls takes {', '.join(known)}, got {', '.join(sorted(unknown))}")
    missing = {name: known[name].missing() for name in args.impls or known}
    for name, reason in missing.items():
        if reason is not None:
            print(f"no column {name}: {reason}", file=sys.stderr)
    return {name: known[name] for name, reason in missing.items() if reason is None}


def cells(args: argparse.Namespace) -> Iterator[tuple[Case, Direction, list[Inputs]]]:
    for seqlen in args.seqlens:
        inputs = [Inputs.random(seqlen, tuple(args.heads), widths(args)) for _ in range(INPUT_SETS)]
        for name in args.masks:
            case = Case(name, seqlen, args.softcap)
            for direction in args.directions:
                yield case, direction, inputs


def main(argv: list[str] | None = None) -> int:
    """Run the cells, print a line each, write the record; 1 if ours failed or outputs differed."""
    argv = sys.argv[1:] if argv is None else argv
    args, begin, failed = options(argv), time.monotonic(), False
    peers = importable(args)
    command = "python -m benchmarks.kernel.speed " + " ".join(argv)
    record = Record(args.record, describe(command, args.commit), args.append)
    compile_flex(args, peers)
    for case, direction, inputs in cells(args):
        label = f"{direction} {case.seqlen:7d} {case.name:20s}"
        if args.seconds and time.monotonic() - begin > args.seconds:
            print(f"{label} skipped: the {args.seconds:.0f} s are over", file=sys.stderr)
            continue
        able, left_out = run_cell(peers, case, direction, inputs)
        times = time_calls(able, Budget(args.rounds, args.cell_seconds)) if able else {}
        board = board_state()
        flops = case.flops(args.heads[0], widths(args), direction)
        key = {
            "head_dim": args.head_dim, "mask": case.name, "seqlen": case.seqlen,
            "direction": direction,
        }  # fmt: skip
        rows = [{**key, "impl": impl, **row(flops, ms), **board} for impl, ms in times.items()]
        record.add(rows)
        print(label, "  ".join(f"{r['impl']} {r['tflops']:.0f}" for r in rows), flush=True)
        for impl, reason in left_out.items():
            print(f"{label} without {impl}: {reason}", file=sys.stderr, flush=True)
        failed |= "ours" in left_out or any(DIFFERS in reason for reason in left_out.values())
    record.finish(describe(command, args.commit))
    if args.compare:
        print("\n".join(slower(record.rows, args.compare)))
    return int(failed)


def compile_flex(args: argparse.Namespace, peers: dict[str, Peer]) -> None:
    if not args.compile_jobs or "flex" not in peers:
        return
    begin = time.monotonic()
    todo = [Case(name, n, softcap=args.softcap) for n in args.seqlens for name in args.masks]
    compile_ahead(todo, (args.heads[0], args.heads[1]), widths(args), args.compile_jobs)
    print(f"flex compiled for {len(todo)} cases in {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
