"""What sinks cost the Hopper kernels: attention with and without them, through autograd.

    python -m benchmarks.kernel.sink --record sink.json

"sh1" and "sh4" are 1 and 4 sinks for all tokens, "ssh1" is one per token; each joins inside the
kernel. "after_sh1" and "after_sh4" multiply out and lse behind a call without sinks, as autograd
functions of PyTorch. All are run in random order in every round; medians count. Needs one Hopper
GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.cell import Call, Case, Direction, Inputs
from benchmarks.lib.options import at_least, new_file
from benchmarks.lib.record import describe
from benchmarks.lib.timing import Budget, Ready, ready, time_calls
from megatron_magi import flex_flash_attn_func
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.kernel.slice_table import slices_tensor
from megatron_magi.core.kernel.widths import Widths

HEADS = (64, 8)
WIDTHS = (Widths(128, 128), Widths(64, 64))
MASKS = ("full", "causal", "packed_causal", "swa1024")
LENGTHS = (4096, 16384)
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd")
SHOWN = ("mask", "seqlen", "direction", "impl", "ms", "ratio")
IMPLS = ("none", "sh1", "sh4", "ssh1", "after_sh1", "after_sh4")


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=at_least(1), default=30)
    parser.add_argument("--cell-seconds", type=float, default=1.0, help="of a direction of a cell")
    parser.add_argument("--record", type=new_file)
    parser.add_argument("--commit", help="for the record, where there is no git")
    return parser.parse_args(argv)


def sinks(impl: str, seqlen: int) -> Tensor | None:
    """fp32 logits that autograd differentiates."""
    if impl == "none":
        return None
    layout, number = impl.removeprefix("after_")[:-1], int(impl[-1])
    shape = (seqlen, number, HEADS[0]) if layout == "ssh" else (number, HEADS[0])
    return torch.randn(shape, device="cuda", requires_grad=True)


def join_after(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """out with sinks, from (out, lse) without."""
    weight = torch.sigmoid(lse - sink.logsumexp(-2))
    return (out.to(lse.dtype) * weight.unsqueeze(-1)).to(out.dtype)


def calls(impl: str, case: Case, x: Inputs) -> dict[Direction, Call]:
    """One forward, and one backward of a result that is kept."""
    leaves, sink = x.leaves(), sinks(impl, case.seqlen)
    slices, after = slices_tensor(case.mask), impl.startswith("after_")

    def attend() -> tuple[Tensor, ...]:
        inside = None if after else sink
        out, meta = flex_flash_attn_func(*leaves, slices=slices, backend="cuda", sink=inside)
        return (join_after(out, meta.lse, sink) if after and sink is not None else out,)

    (made,) = attend()
    needed = leaves if sink is None else [*leaves, sink]
    return {
        "fwd": attend,
        "bwd": lambda: torch.autograd.grad(made, needed, x.dout, retain_graph=True),
    }


def measure(case: Case, widths: Widths, budget: Budget) -> list[dict[str, Any]]:
    """Rows of one cell: medians in ms, and their ratio to attention without sinks."""
    x, rows = Inputs.random(case.seqlen, HEADS, widths), []
    made = {impl: calls(impl, case, x) for impl in IMPLS}
    for direction in DIRECTIONS:
        cell: dict[str, Ready] = {impl: ready([made[impl][direction]] * 2) for impl in IMPLS}
        times = time_calls(cell, budget)
        ms = {impl: statistics.median(t) for impl, t in times.items()}
        rows += [
            {
                "mask": case.name, "seqlen": case.seqlen, "heads": HEADS, "widths": widths,
                "direction": direction, "impl": impl, "ms": round(ms[impl], 4),
                "min_ms": round(min(t), 4), "max_ms": round(max(t), 4),
                "ratio": round(ms[impl] / ms["none"], 4), "n": len(t),
            }
            for impl, t in times.items()
        ]  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args, rows = options(argv), []
    meta = describe(" ".join(["python -m benchmarks.kernel.sink", *argv]), args.commit)
    for widths in WIDTHS:
        for name in MASKS:
            for seqlen in LENGTHS:
                found = measure(Case(name, seqlen), widths, Budget(args.rounds, args.cell_seconds))
                rows += found
                for row in found:
                    shown = (widths.head_dim, *(row[key] for key in SHOWN))
                    print(*shown, flush=True)
                if args.record:
                    args.record.write_text(
                        json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n"
                    )
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
