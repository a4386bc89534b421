"""Speed of the attention kernels beside their peers, all in one process, interleaved.

    python scripts/bench_kernel.py                                  # forward, 16k, ours and cudnn
    python scripts/bench_kernel.py --masks causal,swa1024 --seqlens 8192,65536 --impls ours,fa3
    python scripts/bench_kernel.py --directions fwd,bwd --record benchmarks/records/kernel.json

TFLOP/s count the visible area only: forward 4 * area * head_dim * heads, backward 2.5 times that.
Every round runs each implementation once, on one of several input sets in turn; the median counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_kernel_masks import MASKS
from bench_kernel_peers import Call, available

INPUT_SETS = 2
WARMUP = 2
SPIN_CYCLES = 400_000  # 0.2 ms


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--seqlens", default="16384")
    parser.add_argument("--impls", default="ours,cudnn")
    parser.add_argument("--directions", default="fwd")
    parser.add_argument("--heads", default="64,8", help="query heads, key/value heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", type=Path, help="write a JSON record")
    parser.add_argument("--compare", type=Path, help="print what got over 15 %% slower than there")
    return parser.parse_args(argv)


def make_inputs(seqlen: int, heads: tuple[int, int], dim: int) -> list[torch.Tensor]:
    """q, k, v, dout."""
    shapes = [(seqlen, h, dim) for h in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]


def time_calls(calls: dict[str, list[Call]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every round, implementations interleaved, input sets rotated."""
    for sets in calls.values():
        for call in sets * WARMUP:
            call()
    torch.cuda.synchronize()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for turn, (name, sets) in itertools.product(range(rounds), calls.items()):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)  # the host runs ahead, so that its launch is not timed
        begin.record()
        sets[turn % len(sets)]()
        end.record()
        events[name].append((begin, end))
    torch.cuda.synchronize()
    return {n: [a.elapsed_time(b) for a, b in pairs] for n, pairs in events.items()}


def run_cell(args: argparse.Namespace, name: str, seqlen: int, direction: str) -> list[dict]:
    """One row of the record per implementation that can do this cell."""
    heads = tuple(int(h) for h in args.heads.split(","))
    mask = MASKS[name](seqlen)
    inputs = [make_inputs(seqlen, (heads[0], heads[1]), args.head_dim) for _ in range(INPUT_SETS)]
    calls: dict[str, list[Call]] = {}
    peers = available()
    for impl in args.impls.split(","):
        if impl not in peers:
            print(f"{impl}: not importable here, left out", file=sys.stderr)
            continue
        try:
            made = [peers[impl](direction, name, mask, *x) for x in inputs]
        except Exception as error:  # a peer that cannot run a cell must not end the run
            if impl == "ours":
                raise
            print(f"{impl} {name} {seqlen} {direction}: {str(error)[:200]}", file=sys.stderr)
            continue
        if None not in made:
            calls[impl] = made  # type: ignore[assignment]
    flops = 4 * mask.area() * args.head_dim * heads[0] * (2.5 if direction == "bwd" else 1)
    rows = []
    for impl, times in time_calls(calls, args.rounds).items():
        ms = statistics.median(times)
        rows.append(
            {
                "mask": name, "seqlen": seqlen, "direction": direction, "impl": impl,
                "tflops": round(flops / ms / 1e9, 1), "ms": round(ms, 4),
                "min_ms": round(min(times), 4), "max_ms": round(max(times), 4), "n": len(times),
            }
        )  # fmt: skip
    return rows


def cells(args: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    for direction in args.directions.split(","):
        for seqlen in args.seqlens.split(","):
            for name in args.masks.split(","):
                yield name, int(seqlen), direction


def describe(argv: list[str]) -> dict[str, Any]:
    """The machine and the versions, for the record."""
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit"
    smi = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True
    )
    gpu, driver, *clocks = [x.strip() for x in smi.stdout.splitlines()[0].split(",")]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return {
        "gpu": gpu, "driver": driver, "torch": torch.__version__, "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(), "commit": commit.stdout.strip(),
        "clocks": " / ".join(clocks), "command": "python scripts/bench_kernel.py " + " ".join(argv),
    }  # fmt: skip


def print_slower(rows: list[dict], path: Path) -> None:
    """Timings never fail anything: machines are noisy. They are printed."""
    keys = ("mask", "seqlen", "direction", "impl")
    old = {tuple(r[k] for k in keys): r["tflops"] for r in json.loads(path.read_text())["rows"]}
    for row in rows:
        before = old.get(tuple(row[k] for k in keys))
        if before and row["tflops"] < 0.85 * before:
            print(
                f"slower: {row['mask']} {row['seqlen']} {row['impl']} {before} -> {row['tflops']}"
            )


def main(argv: list[str] | None = None) -> int:
    """Run the cells, print a line each, write the record."""
    argv = sys.argv[1:] if argv is None else argv
    args, rows = options(argv), []
    for name, seqlen, direction in cells(args):
        found = run_cell(args, name, seqlen, direction)
        rows += found
        figures = "  ".join(f"{r['impl']} {r['tflops']:.0f}" for r in found)
        print(f"{direction} {seqlen:7d} {name:20s} {figures}", flush=True)
    if args.compare:
        print_slower(rows, args.compare)
    if args.record:
        args.record.write_text(json.dumps({"meta": describe(argv), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
