"""What it costs the host that ranks compare their calls (docs/agreement.md).

    python -m benchmarks.distributed.agreement                   # all GPUs: alone, and in dist_attn
    python -m benchmarks.distributed.agreement --device cpu --ranks 2  # the comparison alone

One process per rank. Levels:
  compare  one comparison by itself, started as for tensors on a GPU: nobody waits for its result.
           Calls follow each other as in training, one every --every-us microseconds.
  attn     a forward and backward of dist_attn on a small plan with everything warm, in random
           order as it is and with the comparison taken out; the difference is what it adds
Host microseconds of one call, of the slowest rank: the median, the mean (every 16th comparison
sends for the others, which no median shows), the least and the most.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

import megatron_magi as magi
from benchmarks.distributed.calls import Ours, Problem
from benchmarks.lib.options import at_least, new_file
from benchmarks.lib.record import describe
from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.runtime import dist_attn, token_dispatch
from megatron_magi.core.runtime.agreement import comparison as agreement
from megatron_magi.core.runtime.agreement.signature import Call

TOKENS = 512  # of every rank, so that the GPU is done long before the host
HEADS = HeadShape(8, 2, 128)
WARM = 20
US = 1e6


def compare_us(args: argparse.Namespace, group: dist.ProcessGroup) -> list[float]:
    """One comparison after the other, with the pause that a layer's other work makes."""
    mask = masks.from_cu_seqlens([0, TOKENS * args.ranks])
    plan = magi.plan(mask, group, HEADS, MagiConfig())
    call = Call("dist_attn", (HEADS.num_heads_kv, HEADS.head_dim), torch.bfloat16, 1.0)
    agreement.agree(plan, group)
    took = []
    for _ in range(args.calls):
        time.sleep(args.every_us / US)
        began = time.perf_counter()
        agreement.compare(call, plan, group, torch.device("cuda"))
        took.append(US * (time.perf_counter() - began))
    agreement.finish_agreement(group)
    return took[WARM:]


def attn_us(args: argparse.Namespace, group: dist.ProcessGroup) -> dict[str, list[float]]:
    """dist_attn with its comparison and without, by (direction, variant)."""
    like = torch.empty(0, device="cuda", dtype=torch.bfloat16)
    mask = masks.from_cu_seqlens([0, TOKENS * args.ranks])
    ours = Ours(Problem.random(mask, HEADS, like), MagiConfig())
    took: dict[str, list[float]] = {}
    shuffled = random.Random(0)
    for turn in range(args.calls):
        for variant in shuffled.sample(("compared", "not compared"), 2):
            for direction, run in (("forward", ours.forward), ("backward", ours.backward)):
                us = _host_us(run, variant == "compared")
                if turn >= WARM:
                    took.setdefault(f"attn {direction}, {variant}", []).append(us)
    return took


def _host_us(run: Callable[[], object], compared: bool) -> float:
    def nothing(*_: object) -> agreement.Comparison:
        return agreement.Comparison(None, 0, False)

    compare = agreement.compare if compared else nothing
    with (
        mock.patch.object(dist_attn, "compare", compare),
        mock.patch.object(token_dispatch, "compare", compare),
    ):
        torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        run()
        return US * (time.perf_counter() - began)


def serve(rank: int, args: argparse.Namespace, store: str) -> None:
    """One rank; rank 0 prints and writes what the slowest rank took in each round."""
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=args.ranks
    )
    group = dist.group.WORLD
    assert group is not None
    took = {"compare": compare_us(args, group)}
    if args.device == "cuda":
        took |= attn_us(args, group)
    rows = []
    for level, us in took.items():
        slowest = torch.tensor(us, device=args.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        us = [round(x, 2) for x in slowest.tolist()]
        median, mean = statistics.median(us), round(statistics.fmean(us), 2)
        row = {"level": level, "us": median, "mean_us": mean, "min_us": min(us), "max_us": max(us)}
        rows.append({**row, "n": len(us)})
        if rank == 0:
            rest = f"least {min(us):.1f}, most {max(us):.0f}"
            print(f"{level:30s} {median:7.1f} us, mean {mean:.1f} us ({rest})")
    if rank == 0 and args.record:
        command = "python -m benchmarks.distributed.agreement "
        command += f"--device {args.device} --ranks {args.ranks}"
        meta = {**describe(command, args.commit), "date": str(datetime.date.today())}
        meta |= {"calls": args.calls, "every_us": args.every_us}
        args.record.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=at_least(1), default=max(torch.cuda.device_count(), 2))
    parser.add_argument("--calls", type=at_least(WARM + 1), default=1000)
    parser.add_argument(
        "--every-us", type=at_least(0), default=500, help="a pause between comparisons"
    )
    parser.add_argument("--record", type=new_file, help="write a JSON record")
    parser.add_argument("--commit", help="for the record, where there is no git")
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        found = torch.cuda.device_count()
        raise SystemExit(f"{args.ranks} GPUs are needed, got {found}; use --device cpu")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(serve, (args, f"{folder}/store"), nprocs=args.ranks)


if __name__ == "__main__":
    raise SystemExit(guarded(main))
