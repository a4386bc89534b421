"""Distributed attention for a long time: another mask, plan and configuration in every iteration.

    python -m benchmarks.distributed.soak --device cpu --ranks 4 --seconds 3600 --record FILE.json
    python -m benchmarks.distributed.soak --ranks 2 --iterations 10000       # GPUs, NCCL
    python -m benchmarks.distributed.soak --ranks 2 --one-gpu                # which all share

All ranks draw the same case from its number: a mask of a random kind and length, heads, stages,
forward mode, transport, deterministic or not; half of the time a plan that was used before. Output,
lse and gradients of the whole sequence are compared with one rank's attention in every iteration.
Memory is noted on every rank (of the process on the CPU, of PyTorch and of the whole GPU on a GPU).
Exit code 1: a result differs, or memory still grows in the second half of the run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_magi as magi
from benchmarks.distributed.ranks import join
from benchmarks.lib.masks import random_blocks
from benchmarks.lib.options import at_least, new_file, positive
from benchmarks.lib.record import describe, write_record
from benchmarks.lib.timing import difference
from megatron_magi import AttnMask, HeadShape, MagiConfig, masks
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser, UsageError
from megatron_magi.core.plan import AttnPlan

MOST = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Norm of the difference over the norm; bf16 rounds its results at about 4e-3."""
LEAST_TOKENS = 16
"""Of a rank; also the fixed chunk size of some cases, which must leave every rank a chunk."""
KEPT_PLANS = 8
LIBC = ctypes.CDLL(None)
SAMPLES = 60
SHOWN = 10
"""Wrong results that are listed; all are counted."""
GROWTH_MIB = 64.0
"""By how much the memory of the last quarter may exceed that of the quarter before the middle."""


@dataclass(frozen=True)
class Case:
    """What an iteration computes."""

    kind: str
    mask: AttnMask
    heads: HeadShape
    config: MagiConfig


def random_case(number: int, ranks: int, most_tokens: int, device: str) -> Case:
    """The case of a number, equal on every rank."""
    rng = random.Random(number)
    total = rng.randrange(ranks * LEAST_TOKENS, ranks * most_tokens)
    kind = rng.choice(KINDS)
    groups = rng.choice((1, 2))
    dim = rng.choice((64, 128)) if device == "cuda" else rng.choice((8, 16))
    config = MagiConfig(
        overlap_degree=rng.choice((None, None, 0, 1, 2, 5)),
        forward_mode=rng.choice((None, "at_once", "local_first", "staged")),
        deterministic=rng.random() < 0.25,
        dkv_reduce_in_fp32=rng.random() < 0.7,
        transport=rng.choice(("auto", "auto", "all_to_all")),
        chunk_size=rng.choice((None, None, LEAST_TOKENS)),
        keep_received_keys=rng.random() < 0.3,
    )
    return Case(
        kind,
        KINDS_OF[kind](total, rng),
        HeadShape(groups * rng.choice((1, 4)), groups, dim),
        config,
    )


def _packed(total: int, rng: random.Random) -> AttnMask:
    cuts = sorted({0, total, *(rng.randrange(total) for _ in range(rng.randrange(12)))})
    return masks.from_cu_seqlens(cuts, causal=rng.random() < 0.7)


def _window(total: int, rng: random.Random) -> AttnMask:
    return masks.sliding_window(total, (rng.randrange(total), rng.choice((0, 0, 7))))


def _blocks(total: int, rng: random.Random) -> AttnMask:
    return random_blocks(total, rng.choice((16, 48)), 0.3, seed=rng.randrange(1 << 30))


def _video(total: int, rng: random.Random) -> AttnMask:
    size = rng.randrange(8, 200)
    return masks.block_causal([[min(size, total - at) for at in range(0, total, size)]])


KINDS_OF = {
    "full": lambda total, rng: masks.full(total),
    "causal": lambda total, rng: masks.causal(total),
    "packed": _packed,
    "window": _window,
    "block mask": _blocks,
    "block causal": _video,
}
KINDS = list(KINDS_OF)


class Soak:
    """One rank's run."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.group = dist.group.WORLD
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: list[dict[str, float]] = []
        self.plans: deque[tuple[Case, AttnPlan]] = deque(maxlen=KEPT_PLANS)

    def run(self) -> None:
        """Iterate until the time or the number of iterations is reached."""
        began, number, done = time.monotonic(), 0, 0.0
        while done < 1:
            self.step(number)
            number += 1
            done = self._done(number, time.monotonic() - began)
            if done >= (len(self.memory) + 1) / SAMPLES:
                self.memory.append(self._used(time.monotonic() - began, number))

    def step(self, number: int) -> None:
        """One iteration."""
        rng = random.Random(-1 - number)
        if self.plans and rng.random() < 0.5:
            case, plan = rng.choice(list(self.plans))
        else:
            case = random_case(number, self.args.ranks, self.args.tokens, self.device.type)
            plan = magi.plan(case.mask, self.group, case.heads, case.config)
            self.plans.append((case, plan))
        self.seen[case.kind] += 1
        whole = self._tensors(case, number)
        off = difference(self._distributed(plan, whole), self._alone(case, whole))
        if not off < MOST[self.dtype]:
            self.wrong.append(f"iteration {number}, {case.kind}, {case.config}: off by {off:.1e}")

    def _tensors(self, case: Case, number: int) -> list[Tensor]:
        gen = torch.Generator(self.device).manual_seed(number)
        h, g, d = case.heads.num_heads_q, case.heads.num_heads_kv, case.heads.head_dim
        shapes = [(case.mask.total_seqlen_q, n, d) for n in (h, g, g, h)]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return [like.new_empty(shape).normal_(generator=gen) for shape in shapes]

    def _distributed(self, plan: AttnPlan, whole: list[Tensor]) -> tuple[Tensor, ...]:
        """Out, lse and gradients of the whole sequence, from all ranks."""
        q, k, v, dout = (magi.dispatch(x, plan, self.group).detach() for x in whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = magi.dist_attn(*leaves, plan, self.group)
        parts = out.detach(), _finite(lse), *torch.autograd.grad(out, leaves, dout)
        return tuple(magi.undispatch(x, plan, self.group) for x in parts)

    def _alone(self, case: Case, whole: list[Tensor]) -> tuple[Tensor, ...]:
        """The same on one rank."""
        *qkv, dout = whole
        leaves = [x.detach().requires_grad_() for x in qkv]
        out, meta = magi.flex_flash_attn_func(*leaves, slices=case.mask)
        return out.detach(), _finite(meta.lse), *torch.autograd.grad(out, leaves, dout)

    def _done(self, number: int, seconds: float) -> float:
        """The share of the run that is over, as rank 0 sees it."""
        if self.args.seconds is None:
            return number / self.args.iterations
        if number % 10:
            return 0.0
        agreed = torch.tensor([seconds / self.args.seconds], device=self.device)
        dist.broadcast(agreed, 0)
        return float(agreed)

    def _used(self, seconds: float, number: int) -> dict[str, float]:
        """Memory in MiB now, without what the C library keeps for later."""
        gc.collect()
        if hasattr(LIBC, "malloc_trim"):
            LIBC.malloc_trim(0)
        used = {"s": round(seconds, 1), "iterations": number, "process": _resident_mib()}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            allocated = torch.cuda.memory_allocated(self.device)
            used |= {"gpu": (total - free) / 2**20, "allocated": allocated / 2**20}
        return used


def _finite(lse: Tensor) -> Tensor:
    """Rows that see nothing have -inf, of which no difference can be taken."""
    lse = lse.detach()
    return lse.masked_fill(lse.isneginf(), 0)


def _resident_mib() -> float:
    words = Path("/proc/self/statm").read_text().split()
    return int(words[1]) * 4096 / 2**20


def growth(memory: list[dict[str, float]], name: str) -> float:
    """MiB by which the last quarter's median exceeds that of the quarter before the middle."""
    values = [sample[name] for sample in memory]
    quarter = max(len(values) // 4, 1)
    before = values[quarter : 2 * quarter] or values[:1]
    return statistics.median(values[-quarter:]) - statistics.median(before)


def serve(rank: int, args: argparse.Namespace, store: str, results: Any) -> None:
    """One rank; sends what it found."""
    device = join(rank, args.ranks, args.device, store, one_gpu=args.one_gpu)
    soak = Soak(args, device)
    try:
        soak.run()
    finally:
        facts = {"kinds": dict(soak.seen), "memory": soak.memory}
        shown = soak.wrong[:SHOWN]  # the parent reads when all ranks have ended: a pipe is small
        results.put({"rank": rank, "num_wrong": len(soak.wrong), "wrong": shown, **facts})
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    num_gpus = torch.cuda.device_count()
    if args.device == "cuda" and num_gpus < (1 if args.one_gpu else args.ranks):
        raise UsageError(
            f"{args.ranks} ranks need a GPU each, or one with --one-gpu, got {num_gpus}; pass "
            f"fewer --ranks, or --device cpu"
        )
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            serve, (args, f"{folder}/store", results), nprocs=args.ranks, join=True
        )
    found = sorted((results.get() for _ in range(args.ranks)), key=lambda one: one["rank"])
    names = [name for name in found[0]["memory"][0] if name not in ("s", "iterations")]
    grown = {name: [growth(one["memory"], name) for one in found] for name in names}
    last = found[0]["memory"][-1]
    num_wrong = found[0]["num_wrong"]
    print(f"{last['iterations']} iterations in {last['s']:.0f} s on {args.ranks} ranks")
    print(f"{num_wrong} wrong results", *found[0]["wrong"], sep="\n  ")
    print("memory grown, MiB by rank:", {k: [round(x, 1) for x in v] for k, v in grown.items()})
    command = "python -m benchmarks.distributed.soak " + " ".join(argv)
    meta = {**describe(command, args.commit), "python": platform.python_version()}
    write_record(args.record, meta, found, grown_mib=grown)
    return int(num_wrong > 0 or any(x > GROWTH_MIB for xs in grown.values() for x in xs))


def parser() -> argparse.ArgumentParser:
    made = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=at_least(1), default=max(torch.cuda.device_count(), 2))
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU")
    made.add_argument("--tokens", type=at_least(LEAST_TOKENS + 1), default=512,
                      help="most tokens of a rank")  # fmt: skip
    made.add_argument("--iterations", type=at_least(1), default=1000)
    made.add_argument("--seconds", type=positive, help="instead of a number of iterations")
    made.add_argument("--record", type=new_file, help="write a JSON record")
    made.add_argument("--commit", help="for the record, where there is no git")
    return made


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
