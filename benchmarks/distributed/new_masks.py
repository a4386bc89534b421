"""What a new mask costs in every microbatch, beside masks that were seen before.

    python -m benchmarks.distributed.new_masks         # all GPUs; record with --record
    python -m benchmarks.distributed.new_masks --ranks 1 --tokens 4096 --rounds 30
    python -m benchmarks.distributed.new_masks --device cpu --ranks 2 --tokens 64 --heads 4,2 \
        --head-dim 16

A microbatch is a chain of attention layers, forward and backward, over one pack of documents
(packs.py). While it runs, a thread, as of a data loader, makes the plan of the next
microbatch and prepares it for the device. Packs run twice: in a pass of microbatches whose masks
nobody has seen ("new"), and in one whose plans are kept ("repeated"). A round has the new pass over
its packs and the repeated pass over those of the round before, in random order. A pass counts for
its slowest rank. It begins when its first plan is made and ends when the device has ended.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import megatron_magi as magi
from benchmarks.distributed.packs import pack
from benchmarks.distributed.ranks import join
from benchmarks.lib.options import at_least, head_counts, list_of, new_file, one_of
from benchmarks.lib.record import describe
from megatron_magi import AttnMask, HeadShape
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.plan import AttnPlan

WARM_ROUNDS = 2
PASSES = ("new", "repeated")


@dataclass(frozen=True)
class Chain:
    """Layers of attention that feed each other."""

    heads: HeadShape
    layers: int
    q: torch.Tensor
    kv: tuple[torch.Tensor, ...]
    """One of a layer, [T, G, D]; keys and values alike."""
    dout: torch.Tensor

    def run(self, plan: AttnPlan) -> None:
        x = self.q
        for kv in self.kv:
            x, _ = magi.dist_attn(x, kv, kv, plan, dist.group.WORLD)
        torch.autograd.grad(x, (self.q, *self.kv), self.dout)


def chain(tokens: int, args: argparse.Namespace, device: torch.device) -> Chain:
    heads = HeadShape(*args.heads, args.head_dim)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def rows(num_heads: int) -> torch.Tensor:
        return torch.randn(tokens, num_heads, args.head_dim, device=device, dtype=dtype)

    kv = tuple(rows(args.heads[1]).requires_grad_() for _ in range(args.layers))
    q, dout = rows(args.heads[0]).requires_grad_(), rows(args.heads[0])
    return Chain(heads, args.layers, q, kv, dout)


def passed(masks: Sequence[AttnMask], layers: Chain, loader: ThreadPoolExecutor) -> float:
    """Milliseconds of one pass over the masks, each planned while the one before it runs."""
    device = layers.q.device

    def load(mask: AttnMask) -> AttnPlan:
        plan = magi.plan(mask, dist.group.WORLD, layers.heads)
        magi.prepare(plan, dist.group.WORLD, device)
        return plan

    following = loader.submit(load, masks[0])
    following.result()
    slowest(0.0, device)  # all begin together
    begin = time.perf_counter()
    for mask in (*masks[1:], None):
        plan = following.result()
        if mask is not None:
            following = loader.submit(load, mask)
        layers.run(plan)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return slowest(1e3 * (time.perf_counter() - begin), device)


def slowest(ms: float, device: torch.device) -> float:
    """The longest time of a rank, on every rank."""
    longest = torch.tensor([ms], device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def rounds(tokens: int, args: argparse.Namespace, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of the passes of either kind, equal on all ranks."""
    layers, shuffled = chain(tokens, args, device), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in PASSES}
    seen: list[AttnMask] = []
    with ThreadPoolExecutor(1) as loader:
        for turn in range(WARM_ROUNDS + args.rounds + 1):
            seeds = range(turn * args.packs, (turn + 1) * args.packs)
            unseen = [pack(f"{args.documents}:{i}", tokens * args.ranks) for i in seeds]
            due = [("new", unseen), ("repeated", seen)]
            for name, masks in shuffled.sample(due, 2):
                # Rounds are shifted by one pass: the last new packs are never repeated.
                counts = WARM_ROUNDS <= turn - (name == "repeated") < WARM_ROUNDS + args.rounds
                took = passed(masks, layers, loader) if masks else 0.0
                if counts:
                    times[name].append(took)
            seen = unseen
    return times


def row(tokens: int, args: argparse.Namespace, times: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [new / again for new, again in zip(*(times[name] for name in PASSES), strict=True)]
    return {
        "tokens": tokens, "ranks": args.ranks, "layers": args.layers, "packs": args.packs,
        "documents": args.documents,
        **{f"{name}_ms": round(statistics.median(ms) / args.packs, 3)
           for name, ms in times.items()},
        "new_over_repeated": round(statistics.median(ratios), 4),
        "least": round(min(ratios), 4), "most": round(max(ratios), 4), "rounds": len(ratios),
    }  # fmt: skip


def line(found: dict[str, Any]) -> str:
    return (
        f"{found['tokens']:7d} tokens x {found['ranks']}, {found['documents']}: a microbatch of "
        f"{found['layers']} layers takes {found['new_ms']:.2f} ms with a new mask and "
        f"{found['repeated_ms']:.2f} ms with a repeated one; new over repeated "
        f"{found['new_over_repeated']:.3f} ({found['least']:.3f} to {found['most']:.3f})"
    )


def serve(rank: int, args: argparse.Namespace, store: str, command: str) -> None:
    """One rank; rank 0 prints and writes."""
    device = join(rank, args.ranks, args.device, store)
    found = []
    for tokens in args.tokens:
        found.append(row(tokens, args, rounds(tokens, args, device)))
        if rank == 0:
            print(line(found[-1]), flush=True)
            write(args, found, command)
    dist.destroy_process_group()


def write(args: argparse.Namespace, found: list[dict[str, Any]], command: str) -> None:
    if args.record is None:
        return
    meta = {**describe(command, args.commit), "date": str(datetime.date.today())}
    args.record.write_text(json.dumps({"meta": meta, "rows": found}, indent=1) + "\n")


def options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=at_least(1), default=max(torch.cuda.device_count(), 1))
    lengths = list_of(at_least(2))
    parser.add_argument("--tokens", type=lengths, default=[4096, 8192, 16384], help="of every rank")
    known = one_of(("d1", "d2", "wlb", "prolong"))
    parser.add_argument("--documents", type=known, default="d1", help="see packs.py")
    parser.add_argument("--heads", type=head_counts, default=[64, 8], help="query, key/value heads")
    parser.add_argument("--head-dim", type=at_least(1), default=128)
    parser.add_argument("--layers", type=at_least(1), default=8)
    parser.add_argument("--packs", type=at_least(2), default=8, help="microbatches of a pass")
    parser.add_argument("--rounds", type=at_least(1), default=15)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--record", type=new_file, help="write a JSON record")
    parser.add_argument("--commit", help="for the record, where there is no git")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = options(argv)
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        found = torch.cuda.device_count()
        print(f"{args.ranks} GPUs are needed, got {found}; use --device cpu", file=sys.stderr)
        return 2
    command = "python -m benchmarks.distributed.new_masks " + " ".join(argv)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(serve, (args, f"{folder}/store", command), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
