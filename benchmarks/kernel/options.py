"""Cost of one option of the Hopper kernels: attention with it and without it.

    python -m benchmarks.kernel.options {sink,softcap,max_logits,deterministic} --record FILE.json

sink: through autograd. "sh1" and "sh4" are 1 and 4 sinks for all tokens, "ssh1" is one per token;
each joins inside the kernel. "after_sh1" and "after_sh4" multiply out and lse after a call without
sinks. softcap: below autograd, on queries times each of --sizes, the standard deviation of the
scaled scores. max_logits: the forward below autograd. deterministic: the backward through autograd,
compared with the fast one and with deterministic peers, as far as they can be imported; it fails if
repeated backwards differ. Calls of a cell run in random order in every round; medians count. Needs
one Hopper GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel.peers import Ours, all_peers
from benchmarks.kernel.speed import INPUT_SETS, run_cell
from benchmarks.lib.cell import Call, Case, Direction, Inputs, Peer
from benchmarks.lib.options import at_least, new_file
from benchmarks.lib.record import describe, write_record
from benchmarks.lib.timing import Budget, Ready, ready, row, time_calls
from megatron_magi import flex_flash_attn_func
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.kernel.attention import no_logits
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.head_dims import COMPILED_WIDTHS, HeadDims
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.kernel.slice_table import slices_tensor

HEADS = {64: (64, 8), 96: (64, 8), 128: (64, 8), 192: (16, 16), 256: (16, 4)}
"""Query and key/value heads, by head_dim."""
SINKS = ("none", "sh1", "sh4", "ssh1", "after_sh1", "after_sh4")
PEERS = ("fa3", "fa4", "ffa")
SUFFIX, REPEATS = "_deterministic", 3

Cell = tuple[dict[str, Any], Direction, dict[str, Ready]]
"""What names the cell, the direction that counts operations, and the calls by name."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """HeadDims, mask and length of some cells, and what else was asked for."""

    widths: HeadDims
    case: Case
    args: argparse.Namespace

    @property
    def heads(self) -> tuple[int, int]:
        return HEADS[self.widths.head_dim]

    def inputs(self) -> Inputs:
        return Inputs.random(self.case.seqlen, self.heads, self.widths)


def sink_cells(at: Setting) -> Iterator[Cell]:
    x = at.inputs()
    made = {impl: sink_calls(impl, at, x) for impl in SINKS}
    directions: tuple[Direction, ...] = ("fwd", "bwd")
    for direction in directions:
        calls = {impl: ready([made[impl][direction]] * 2) for impl in SINKS}
        yield {"heads": at.heads, "widths": at.widths}, direction, calls


def sink_calls(impl: str, at: Setting, x: Inputs) -> dict[Direction, Call]:
    """One forward, and one backward of a result that is kept."""
    leaves, slices, sink = x.leaves(), slices_tensor(at.case.mask), None
    is_after = impl.startswith("after_")
    if impl != "none":
        layout, number = impl.removeprefix("after_")[:-1], int(impl[-1])
        tokens = (at.case.seqlen,) if layout == "ssh" else ()
        shape = (*tokens, number, at.heads[0])
        sink = torch.randn(shape, device="cuda", requires_grad=True)

    def attend() -> tuple[Tensor, ...]:
        inside = None if is_after else sink
        out, meta = flex_flash_attn_func(*leaves, slices=slices, backend="cuda", sink=inside)
        if not is_after or sink is None:
            return (out,)
        weight = torch.sigmoid(meta.lse - sink.logsumexp(-2))
        return ((out.to(meta.lse.dtype) * weight.unsqueeze(-1)).to(out.dtype),)

    (kept,) = attend()
    needed = leaves if sink is None else [*leaves, sink]
    return {
        "fwd": attend,
        "bwd": lambda: torch.autograd.grad(kept, needed, x.dout, retain_graph=True),
    }


def softcap_cells(at: Setting) -> Iterator[Cell]:
    normal = at.inputs()
    directions: dict[str, tuple[Direction, bool]] = {
        "fwd": ("fwd", False), "bwd": ("bwd", False), "deterministic": ("bwd", True),
    }  # fmt: skip
    for size in at.args.sizes:
        x = normal.of_size(size)
        for name, (direction, is_deterministic) in directions.items():
            calls = {}
            for which, cap in (("without", 0.0), ("softcap", at.args.softcap)):
                case = replace(at.case, softcap=cap, deterministic=is_deterministic)
                calls[which] = ready([Ours().below_autograd(case, direction, x)] * 2)
            dims = dict(zip(("head_dim", "value_dim"), at.widths, strict=True))
            yield {**dims, "heads": at.heads, "size": size, "direction": name}, direction, calls


def max_logits_cells(at: Setting) -> Iterator[Cell]:
    x = at.inputs()
    plain = AttnCall(x.q, x.k, x.v, at.case.table, at.widths.head_dim**-0.5)
    most, none = no_logits(x.q), no_logits(x.q)
    kernel = select_backend("cuda", x.q.device, x.q.dtype, at.widths)

    def forward(call: AttnCall) -> Call:
        def run() -> tuple[Tensor, ...]:
            most.copy_(none)  # a call knows nothing of the one before; both pay for it
            return tuple(kernel.forward(call))

        return run

    calls = {"plain": plain, "max_logits": plain._replace(max_logits=most)}
    timed = {name: ready([forward(call)] * 2) for name, call in calls.items()}
    yield {"heads": at.heads, "widths": at.widths}, "fwd", timed


class Deterministic:
    """A peer of which gradients with equal bits are asked."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def missing(self) -> str | None:
        return self.peer.missing()

    def refuses(self, case: Case, direction: Direction) -> str | None:
        return self.peer.refuses(replace(case, deterministic=True), direction)

    def call(self, case: Case, direction: Direction, x: Inputs) -> Call:
        return self.peer.call(replace(case, deterministic=True), direction, x)


def deterministic_cells(at: Setting) -> Iterator[Cell]:
    known = all_peers()
    peers = {"ours": known["ours"], "ours" + SUFFIX: Deterministic(known["ours"])}
    for name in PEERS:
        reason = known[name].missing()
        if reason is None:
            peers[name + SUFFIX] = Deterministic(known[name])
        else:
            print(f"no column {name}: {reason}", file=sys.stderr)
    able, left_out = run_cell(peers, at.case, "bwd", [at.inputs() for _ in range(INPUT_SETS)])
    for name, reason in left_out.items():
        print(f"{at.case.seqlen:7d} {at.case.name:15s} without {name}: {reason}", file=sys.stderr)
    yield {"heads": at.heads, "widths": at.widths}, "bwd", able


def same_bits(call: Call) -> bool:
    first = call()
    again = [call() for _ in range(REPEATS - 1)]
    return all(torch.equal(a, b) for made in again for a, b in zip(made, first, strict=True))


def unfit(rows: Rows) -> list[str]:
    """Reasons why a cell of `deterministic` fails: a missing column, or bits that differ."""
    found = {r["impl"]: r["same_bits"] for r in rows}
    lacking = [f"no {name}" for name in ("ours", "ours" + SUFFIX) if name not in found]
    equal = found.get("ours" + SUFFIX, True)
    return lacking if equal else [*lacking, f"ours{SUFFIX} has other bits in another run"]


def rows_of(
    key: dict[str, Any], flops: float, times: dict[str, list[float]], is_pair: bool
) -> Rows:
    """A row for each call, or one for a pair, with the ratio of medians to the first call."""
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    base = next(iter(medians.values()), 1.0)
    figures = {name: row(flops, ms) for name, ms in times.items()}
    ratios = {name: round(ms / base, 4) for name, ms in medians.items()}
    if is_pair:
        *_, last = figures
        return [{**key, **figures, "ratio": ratios[last], "n": len(times[last])}]
    return [{**key, "impl": name, **figures[name], "ratio": ratios[name]} for name in figures]


@dataclass(frozen=True)
class Option:
    cells: Callable[[Setting], Iterator[Cell]]
    head_dims: tuple[int, ...]
    masks: tuple[str, ...]
    seqlens: tuple[int, ...]
    is_pair: bool = False
    """One row for both calls of a cell."""


ALL = tuple(widths.head_dim for widths in COMPILED_WIDTHS)
DENSE = ("full", "causal", "packed_causal")
OPTIONS = {
    "sink": Option(sink_cells, (128, 64), (*DENSE, "swa1024"), (4096, 16384)),
    "softcap": Option(softcap_cells, ALL, ("full", "causal"), (16384,), is_pair=True),
    "max_logits": Option(max_logits_cells, ALL, DENSE, (16384,), is_pair=True),
    "deterministic": Option(
        deterministic_cells, (128,), (*DENSE, "packed_full", "swa1024", "prefix_tree"),
        (4096, 16384),
    ),
}  # fmt: skip


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("option", choices=OPTIONS)
    parser.add_argument("--head-dims", type=int, nargs="+", choices=ALL)
    parser.add_argument("--masks", nargs="+")
    parser.add_argument("--seqlens", type=at_least(1), nargs="+")
    parser.add_argument("--softcap", type=float, default=30.0)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.0, 8.0, 30.0])
    parser.add_argument("--rounds", type=at_least(1), default=30)
    parser.add_argument("--cell-seconds", type=float, default=1.0, help="of a direction of a cell")
    parser.add_argument("--record", type=new_file)
    parser.add_argument("--commit", help="for the record, where there is no git")
    return parser.parse_args(argv)


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    option = OPTIONS[args.option]
    for widths in COMPILED_WIDTHS:
        if widths.head_dim in (args.head_dims or option.head_dims):
            for name in args.masks or option.masks:
                for seqlen in args.seqlens or option.seqlens:
                    yield Setting(widths, Case(name, seqlen), args)


def main(argv: list[str] | None = None) -> int:
    """Run the cells, print a line for each row, write the record; 1 if bits differed."""
    argv = sys.argv[1:] if argv is None else argv
    args = arguments(argv)
    rows: Rows = []
    failed = False
    meta = describe(" ".join(["python -m benchmarks.kernel.options", *argv]), args.commit)
    if args.option == "softcap":
        meta |= {"softcap": args.softcap}
    option = OPTIONS[args.option]
    for at in settings(args):
        for more, direction, calls in option.cells(at):
            times = time_calls(calls, Budget(args.rounds, args.cell_seconds)) if calls else {}
            key = {"mask": at.case.name, "seqlen": at.case.seqlen, "direction": direction, **more}
            flops = at.case.flops(at.heads[0], at.widths, direction)
            found = rows_of(key, flops, times, option.is_pair)
            if args.option == "deterministic":
                found = [{**r, "same_bits": same_bits(calls[r["impl"]].calls[0])} for r in found]
                for reason in unfit(found):
                    failed = True
                    print(f"{at.case.seqlen:7d} {at.case.name:15s} {reason}", file=sys.stderr)
            for r in found:
                shown = ("mask", "seqlen", "direction", "size", "impl", "ms", "ratio", "same_bits")
                print(at.widths.head_dim, *(r[k] for k in shown if k in r), flush=True)
            rows += found
            write_record(args.record, meta, rows)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
