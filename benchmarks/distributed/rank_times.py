"""Kernel times of every rank of a plan, on one GPU and without exchanges: how balanced plans are.

    python -m benchmarks.distributed.rank_times --record FILE.json
    python -m benchmarks.distributed.rank_times --masks causal,d1:0-9 --tokens 8192 --ranks 8
    python -m benchmarks.distributed.rank_times --dry     # plans alone, without a GPU

For each mask and length, every rank's keys, own and received, lie in one buffer. Timed in random
order, medians:
  forward    one launch
  backward   one launch, which computes delta itself and writes dq in 16 bits
  stages     the backward in the plan's stages: delta, then each stage adds to dq in fp32
  beside     the same, with the stages on received keys concurrently, on the side stream
and the whole mask on the GPU, divided by the number of ranks. A rank's gradients are not compared
here; tests/core/runtime does that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from benchmarks.distributed.packs import pack, packs
from benchmarks.lib.masks import MASKS
from benchmarks.lib.options import at_least, list_of, new_file
from benchmarks.lib.record import describe, write_record
from benchmarks.lib.timing import in_turn
from megatron_magi import AttnMask, HeadShape, MagiConfig
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser, UsageError
from megatron_magi.core.cuda.side_stream import side_stream
from megatron_magi.core.kernel.backend import AttnBackend, AttnCall, GradCall
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.plan import AttnPlan, StagePlan, make_attn_plan

DEFAULT_MASKS = "packed_causal,packed_block_causal,swa1024,causal,d1:0-9"
HEADS = HeadShape(64, 8, 128)
SCALE = HEADS.head_dim**-0.5
WARM_TURNS = 2
BUSY_CYCLES = 3_000_000
"""The GPU waits so long, about 1.5 ms, while the host enqueues a call."""

LATE_CYCLES = 4_000_000
"""About 2 ms, after which the rows of the first remote stage have arrived."""

Calls = dict[str, Callable[[], object]]


class Rank:
    """The kernel calls of one rank, on random tensors."""

    def __init__(self, kernel: AttnBackend, tokens: int, own_first: bool = False) -> None:
        self.kernel, h, d = kernel, HEADS.num_heads_q, HEADS.head_dim
        self.own_first = own_first
        self.q, self.dout, self.out = (_random(tokens, h, d) for _ in range(3))
        self.lse = torch.full((tokens, h), 8.0, device="cuda")

    def at_once(self, stage: StagePlan) -> Calls:
        """Forward and backward over all keys of a rank."""
        call = self._call(stage)
        grad = GradCall(self.dout, self.lse, out=self.out, dtype=self.q.dtype)
        return {
            "forward": lambda: self.kernel.forward(call),
            "backward": lambda: self.kernel.backward(call, grad),
        }

    def staged(self, stages: Sequence[StagePlan]) -> Calls:
        """The backward in stages, own keys last."""
        own, *remote = (self._call(stage) for stage in stages if len(stage.slices))

        def run(concurrent: bool) -> None:
            delta = self.kernel.delta(self.out, self.dout, torch.float32)
            dq = torch.zeros_like(self.q, dtype=torch.float32)
            grad = GradCall(self.dout, self.lse, delta, dq=dq)
            side = side_stream(self.q.device)
            with side.current() if concurrent else nullcontext():
                if concurrent and self.own_first:  # as rows that are still under way
                    torch.cuda._sleep(LATE_CYCLES)
                kept = [self.kernel.backward(call, grad) for call in remote]
            _, *sums = self.kernel.backward(own, grad)
            if concurrent:
                side.join()
            dq.to(self.q.dtype), *(x.to(self.q.dtype) for x in sums)
            del kept

        return {"stages": lambda: run(False), "beside": lambda: run(True)}

    def _call(self, stage: StagePlan) -> AttnCall:
        k, v = (_random(stage.num_keys, HEADS.num_heads_kv, HEADS.head_dim) for _ in range(2))
        table = SliceTable(stage.slices, len(self.q), stage.num_keys, stage.left_rows)
        return AttnCall(self.q, k, v, table, SCALE)


def _random(tokens: int, heads: int, dim: int) -> torch.Tensor:
    return torch.randn(tokens, heads, dim, dtype=torch.bfloat16, device="cuda")


def plans_of(mask: AttnMask, args: argparse.Namespace) -> tuple[AttnPlan, AttnPlan]:
    """The plan, and the one in which its ranks have one stage."""
    config = MagiConfig(overlap_degree=args.overlap_degree)
    plan = make_attn_plan(mask, args.ranks, HEADS, config)
    one = replace(config, overlap_degree=0, forward_mode="at_once")
    return plan, make_attn_plan(mask, args.ranks, HEADS, one, layout=plan.layout)


def measure(name: str, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one mask and length."""
    total = tokens * args.ranks
    mask = pack(name, total) if packs(name) else MASKS[name](total)
    plan, one = plans_of(mask, args)
    row: dict[str, Any] = {
        "mask": name, "tokens": tokens, "ranks": args.ranks, "chunk": plan.layout.chunk_size,
        "imbalance": round(plan.imbalance, 4), "loads": plan.loads.tolist(),
        "received_rows": plan.rows_received.tolist(),
    }  # fmt: skip
    if args.dry:
        return row
    kernel = select_backend("cuda", torch.device("cuda", 0), torch.bfloat16)
    calls: Calls = {}
    for number in range(args.ranks):
        rank = Rank(kernel, plan.layout.num_local_tokens, args.own_first)
        found = rank.at_once(one.rank_plan(number).stages[0])
        found |= rank.staged(plan.rank_plan(number).stages)
        calls |= {f"{number} {what}": call for what, call in found.items()}
    whole = StagePlan(mask.slices, total, None)
    alone = Rank(kernel, total).at_once(whole)
    ms = timed(calls | {f"one {what}": call for what, call in alone.items()}, args.turns)
    row["ms"] = {name: round(took / (args.ranks if name[:3] == "one" else 1), 4)
                 for name, took in ms.items()}  # fmt: skip
    return row


def timed(calls: Calls, turns: int) -> dict[str, float]:
    """Medians in milliseconds."""
    for call in [*calls.values()] * WARM_TURNS:
        call()
    times = in_turn({name: [call] for name, call in calls.items()}, turns, BUSY_CYCLES)
    return {name: statistics.median(took) for name, took in times.items()}


def line(row: dict[str, Any]) -> str:
    """Slowest over mean rank, and half of one GPU over the slowest, for the screen."""
    shown = [f"{row['mask']:20s} {row['tokens']:6d} tiles {row['imbalance']:.3f}"]
    names = ("forward", "backward", "stages", "beside")
    for what in [name for name in names if f"0 {name}" in row.get("ms", ())]:
        ms = [row["ms"][f"{rank} {what}"] for rank in range(row["ranks"])]
        alone = row["ms"]["one forward" if what == "forward" else "one backward"]
        ratio = max(ms) * len(ms) / sum(ms)
        shown.append(f"{what} {max(ms):.3f} ms ({ratio:.3f}, {alone / max(ms):.3f} of one GPU)")
    return " | ".join(shown)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    names = [name for word in args.masks.split(",") for name in packs(word) or [word]]
    if unknown := {name for name in names if not packs(name)} - set(MASKS):
        raise SystemExit(f"error: --masks takes {', '.join(MASKS)} and packs as d1:0-6, got "
                         f"{', '.join(sorted(unknown))}")  # fmt: skip
    if not args.dry and not torch.cuda.is_available():
        raise UsageError("kernel times need a GPU, got none; pass --dry for plans alone")
    rows = []
    for tokens in args.tokens:
        for name in names:
            rows.append(measure(name, tokens, args))
            print(line(rows[-1]), flush=True)
            command = "python -m benchmarks.distributed.rank_times " + " ".join(argv)
            write_record(args.record, describe(command, args.commit), rows)
    return 0


def parser() -> argparse.ArgumentParser:
    made = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--masks", default=DEFAULT_MASKS)
    made.add_argument(
        "--tokens", type=list_of(at_least(1)), default="4096,8192,16384", help="of every rank"
    )
    made.add_argument("--ranks", type=at_least(1), default=2)
    made.add_argument("--overlap-degree", type=at_least(1), help="default: as planned")
    made.add_argument(
        "--own-first", action="store_true", help="beside: the stage on own keys runs 2 ms before"
    )
    made.add_argument("--turns", type=at_least(1), default=10)
    made.add_argument("--dry", action="store_true", help="plan, without a GPU")
    made.add_argument("--record", type=new_file, help="write a JSON record")
    made.add_argument("--commit", help="for the record, where there is no git")
    return made


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
