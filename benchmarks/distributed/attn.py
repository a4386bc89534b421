"""Distributed attention on the GPUs of one host, compared with its own kernels and the plain way.

    python -m benchmarks.distributed.attn                        # all GPUs, 16k tokens each
    python -m benchmarks.distributed.attn --ranks 4 --tokens 8192,16384 --record dist.json
    python -m benchmarks.distributed.attn --masks causal,d1:0-6,d2:0-6  # packs: packs.py
    python -m benchmarks.distributed.attn --device cpu --ranks 2 --tokens 64 --heads 4,2 \
        --head-dim 16

One process per rank. Implementations, in random order, round after round; a round starts together
and counts for its slowest rank, the median of the rounds is reported. The GPUs are kept busy while
the host enqueues a round, as by the layers before it in a model; what the host takes is host_ms.
Every timed backward follows an untimed forward.
  ours         dist_attn as planned; oursN: overlap degree N, forward and backward
  at_once, local_first, staged: the forward mode of this name, the planner's overlap degree
  symm_mem, all_to_all: ours with this transport, see MagiConfig
  all_to_allN  likewise in N stages, forward and backward: from four on, reduces have a
               communicator of their own
  keep_received_keys: ours, whose backward reads what the forward has received
  send_queries_on, send_queries_off: ours with this setting; cross-attention chooses by itself
  narrow       ours with partial gradients of keys and values in the inputs' dtype on the wire
  kernels      the kernel calls of `ours` on rows that are there: the rest is what the wire costs
  all_gather   contiguous tokens, all keys and values to every rank
  all_gather_zigzag: the same on the usual balanced layout: zigzag per document where the mask is
               packed documents (what Megatron and TransformerEngine do), else zigzag per sequence
  ring         keys and values go round, fp32 gradients with them, on that balanced layout
  ulysses      an all-to-all gives every rank all tokens of some heads, another takes them back
  one_gpu      the whole mask on every GPU by itself (as many times longer as there are ranks)
  te_cudnn_p2p, te_cudnn_all_gather, te_cudnn_a2a, and with fa3 for cudnn: TransformerEngine's own
               context parallelism on either kernel (te.py), one kernel in a program
The five before run on our kernel, and with _fa3 behind their name on FlashAttention-3, where
flash_attn_interface can be imported: packed documents that are full, causal, or causal with a
window (which the ring does not take). flash.py says how; one_gpu_fa3 only if asked for.
TFLOP/s per GPU count the visible area once: forward 4 * area * head_dim * heads / ranks, backward
2.5 times that; one_gpu without the division. Out and gradients of the whole sequence must agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.distributed.calls import (
    AllGather,
    Call,
    CannotRun,
    KernelsOnly,
    OneGpu,
    Ours,
    Problem,
)
from benchmarks.distributed.cross import CROSS_MASKS
from benchmarks.distributed.flash import FA3, FlashKernel, missing, refuses
from benchmarks.distributed.packs import pack, packs
from benchmarks.distributed.peers import Ring, Ulysses
from benchmarks.distributed.ranks import join
from benchmarks.distributed.slowest_rank import nothing, timed
from benchmarks.distributed.te import (
    METHODS,
    TransformerEngine,
    choose_kernel,
    engine_kernels,
    missing_engine,
)
from benchmarks.distributed.zigzag import AllGatherZigzag
from benchmarks.lib.masks import MASKS
from benchmarks.lib.options import at_least, head_counts, list_of, new_file
from benchmarks.lib.record import describe, write_record
from benchmarks.lib.timing import MOST_DIFFERENCE, difference
from megatron_magi import HeadShape, MagiConfig
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser, UsageError

DEFAULT_MASKS = "full,causal,packed_causal,packed_block_causal,swa1024"
RIVALS = {
    "all_gather": AllGather, "all_gather_zigzag": AllGatherZigzag, "ring": Ring,
    "ulysses": Ulysses, "one_gpu": OneGpu,
}  # fmt: skip
ON_FLASH = tuple(name + FA3 for name in RIVALS if name != "one_gpu")
DEFAULT_IMPLS = ("ours", "kernels", *RIVALS, *ON_FLASH)
IMPLS = (
    r"ours\d*|at_once|local_first|staged|symm_mem|all_to_all|all_to_all\d+|"
    r"keep_received_keys|narrow|kernels|send_queries_(on|off)|"
    rf"({'|'.join(RIVALS)})({FA3})?|{METHODS}"
)
SETTINGS: dict[str, dict[str, Any]] = {
    "ours": {},
    **{mode: {"forward_mode": mode} for mode in ("at_once", "local_first", "staged")},
    **{transport: {"transport": transport} for transport in ("symm_mem", "all_to_all")},
    **{f"send_queries_{on}": {"send_queries": on == "on"} for on in ("on", "off")},
    "keep_received_keys": {"keep_received_keys": True}, "narrow": {"dkv_reduce_in_fp32": False},
}  # fmt: skip
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""CUDA reads it when a process first touches a GPU; Megatron sets it to 1."""
WARM_ROUNDS = 2


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=at_least(1), default=max(torch.cuda.device_count(), 1))
    lengths = list_of(at_least(1))
    parser.add_argument("--tokens", type=lengths, default=[16384], help="of every rank")
    parser.add_argument("--masks", default=DEFAULT_MASKS, help="and packs, as d1:0-6")
    parser.add_argument("--impls", help="default: all but the variants of ours")
    parser.add_argument(
        "--heads", type=head_counts, nargs="+", default=[[64, 8]], help="query, key/value heads"
    )
    parser.add_argument(
        "--head-dim", type=at_least(1), nargs="+", default=[128], help="one, or of every --heads"
    )
    parser.add_argument("--rounds", type=at_least(1), default=16)
    parser.add_argument(
        "--max-connections",
        type=at_least(1),
        metavar="N",
        help="CUDA_DEVICE_MAX_CONNECTIONS of the ranks",
    )
    parser.add_argument("--seconds", type=float, help="begin no mask after this time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--record", type=new_file, help="write a JSON record, after every mask")
    parser.add_argument("--commit", help="for the record, where there is no git")
    args = parser.parse_args(argv)
    if len(args.head_dim) not in (1, len(args.heads)):
        parser.error(f"--head-dim takes one value or {len(args.heads)}, got {len(args.head_dim)}")
    sizes = args.head_dim if len(args.head_dim) > 1 else args.head_dim * len(args.heads)
    args.shapes = [HeadShape(*of, size) for of, size in zip(args.heads, sizes, strict=True)]
    indivisible = [kv for _, kv in args.heads if kv % args.ranks]
    usual = [name for name in DEFAULT_IMPLS if method(name) != "ulysses" or not indivisible]
    args.impls = args.impls.split(",") if args.impls else usual
    args.masks = [name for word in args.masks.split(",") for name in packs(word) or [word]]
    if unknown := {name for name in args.masks if not packs(name)} - {*MASKS, *CROSS_MASKS}:
        parser.error(
            f"--masks takes {', '.join([*MASKS, *CROSS_MASKS])} and packs as d1:0-6, got "
            f"{', '.join(sorted(unknown))}"
        )
    if len(engine_kernels(args.impls)) > 1:
        parser.error("--impls takes TransformerEngine on one kernel, cudnn or fa3, got both")
    if unknown := {name for name in args.impls if not re.fullmatch(IMPLS, name)}:
        parser.error(f"--impls takes names that match {IMPLS}, got {', '.join(sorted(unknown))}")
    if "ulysses" in map(method, args.impls) and indivisible:
        parser.error(
            f"ulysses needs key/value heads that {args.ranks} ranks divide, got {indivisible[0]}; "
            f"leave it out of --impls"
        )
    return args


def method(name: str) -> str:
    """What the implementation does, on whichever kernel."""
    return name.removesuffix(FA3)


def importable(impls: list[str]) -> list[str]:
    """Those that can run here; why others cannot is said.

    Raises:
        UsageError: none can.
    """
    on_flash = [name for name in impls if name.endswith(FA3)]
    on_engine = [name for name in impls if re.fullmatch(METHODS, name)]
    able = impls
    for names, why_not in ((on_flash, missing), (on_engine, missing_engine)):
        if names and (reason := why_not()):
            print(f"no columns {', '.join(names)}: {reason}", file=sys.stderr)
            able = [name for name in able if name not in names]
    if able:
        return able
    raise UsageError("--impls has no implementation that can run here; add ours")


def build(name: str, x: Problem, made: dict[str, Call]) -> Call:
    """The implementation called so; `kernels` runs the plan of `ours`."""
    if name in SETTINGS:
        return Ours(x, MagiConfig(**SETTINGS[name]))
    if name.startswith("ours"):
        return Ours(x, MagiConfig(overlap_degree=int(name[4:]), forward_mode="staged"))
    if name.startswith("all_to_all"):
        degree = int(name.removeprefix("all_to_all"))
        return Ours(
            x, MagiConfig(transport="all_to_all", overlap_degree=degree, forward_mode="staged")
        )
    if name == "kernels":
        ours = made["ours"] if "ours" in made else Ours(x, MagiConfig())
        assert isinstance(ours, Ours)
        if len(ours.plan.query_transfers):
            raise CannotRun("the plan of ours sends queries")
        return KernelsOnly(x, ours)
    if x.mask.total_seqlen_k != x.mask.total_seqlen_q and name != "one_gpu":
        raise CannotRun("keys have a home of their own")
    if re.fullmatch(METHODS, name):
        return TransformerEngine(x, name)
    if name.endswith(FA3):
        x = dataclasses.replace(x, flash=FlashKernel(x.mask))
    return RIVALS[method(name)](x)


def disagreements(made: dict[str, Call]) -> Iterator[str]:
    """Implementations whose whole-sequence results differ from the first one's."""
    first: tuple[torch.Tensor, ...] | None = None
    for name, call in made.items():
        full = call.full()
        if full is None:
            continue
        first = full if first is None else first
        off = difference(full, first)
        if not off < MOST_DIFFERENCE:
            yield f"{name} differs by {off:.1e}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one measurement is about."""

    mask: str
    """A mask's name, or a pack's."""
    tokens: int
    """Tokens of a rank."""
    shape: HeadShape
    """Heads and their size."""


def settings(args: argparse.Namespace) -> list[Setting]:
    """All of a program, in its order."""
    kinds = itertools.product(args.shapes, args.tokens, args.masks)
    return [Setting(mask, tokens, shape) for shape, tokens, mask in kinds]


def run_setting(
    setting: Setting, args: argparse.Namespace, device: torch.device
) -> tuple[list[dict[str, Any]], list[str], dict[str, str]]:
    """Rows of one setting (equal on every rank), what disagreed, what was left out and why."""
    name, shape, total = setting.mask, setting.shape, setting.tokens * args.ranks
    mask = pack(name, total) if packs(name) else {**MASKS, **CROSS_MASKS}[name](total)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    like = torch.empty(0, device=device, dtype=dtype)
    x = Problem.random(mask, shape, like)
    refused = {n: refuses(method(n), mask) for n in args.impls if n.endswith(FA3)}
    left_out = {impl: reason for impl, reason in refused.items() if reason is not None}
    made: dict[str, Call] = {}
    for impl in args.impls:
        if impl not in left_out:
            try:
                made[impl] = build(impl, x, made)
            except CannotRun as error:
                left_out[impl] = str(error)
    wrong = list(disagreements(made))
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    shuffled = random.Random(0)  # a power-limited GPU is slower after some than after others
    for turn in range(WARM_ROUNDS + args.rounds):
        for impl, call in shuffled.sample(list(made.items()), len(made)):
            for direction, run in (("fwd", call.forward), ("bwd", call.backward)):
                forward = getattr(call, "before_backward", call.forward)
                took = timed(run, forward if direction == "bwd" else nothing, device)
                if turn >= WARM_ROUNDS:
                    times.setdefault((impl, direction), []).append(took)
    flops = 4 * mask.area() * shape.num_heads_q * shape.head_dim
    rows = []
    for (impl, direction), measured in times.items():
        ms, host_ms = zip(*measured, strict=True)
        share = (2.5 if direction == "bwd" else 1) * flops
        share /= 1 if method(impl) == "one_gpu" else args.ranks
        row = {
            "mask": name, "tokens": setting.tokens, "ranks": args.ranks, "impl": impl,
            "heads": [shape.num_heads_q, shape.num_heads_kv], "head_dim": shape.head_dim,
            "direction": direction, "tflops": round(share / statistics.median(ms) / 1e9, 2),
            "ms": round(statistics.median(ms), 3), "min_ms": round(min(ms), 3),
            "max_ms": round(max(ms), 3), "host_ms": round(statistics.median(host_ms), 3),
            "n": len(ms),
        }  # fmt: skip
        call = made[impl]
        if isinstance(call, Ours):
            row["received_rows"] = [int(n) for n in call.plan.rows_received]
            row["imbalance"] = round(call.plan.imbalance, 4)
            row["forward_mode"] = call.plan.forward_mode
            row["overlap_degree"] = call.plan.overlap_degree
        if isinstance(call, AllGatherZigzag | Ring | TransformerEngine):
            row["layout"] = call.layout.name
            row["padding_tokens"] = call.layout.padding_tokens
        rows.append(row)
    return rows, wrong, left_out


def show(rows: list[dict[str, Any]], wrong: list[str], left_out: dict[str, str]) -> None:
    for impl, reason in left_out.items():
        print(f"{impl} left out: {reason}", file=sys.stderr)
    if not rows:
        return
    row = rows[0]
    heads = "{}/{} x {}".format(*row["heads"], row["head_dim"])
    label = f"{row['tokens']:7d} x {row['ranks']} {heads} {row['mask']:20s}"
    for direction in ("fwd", "bwd"):
        shown = [r for r in rows if r["direction"] == direction]
        cells = "  ".join(f"{r['impl']} {r['tflops']:.0f} ({r['ms']:.2f} ms)" for r in shown)
        print(direction, label, cells, flush=True)
    print("".join(f"WRONG: {line}\n" for line in wrong), end="", flush=True)


def serve(rank: int, args: argparse.Namespace, store: str, command: str) -> None:
    """One rank; rank 0 prints and writes. Raises SystemExit(1) if results disagreed."""
    if args.max_connections is not None:
        os.environ[MAX_CONNECTIONS] = str(args.max_connections)  # CUDA reads it as it starts
    device = join(rank, args.ranks, args.device, store)
    began, rows, failed = time.monotonic(), [], False
    for setting in settings(args):
        over = torch.tensor([time.monotonic() - began], device=device)
        dist.broadcast(over, 0)  # ranks must agree whether to go on
        if args.seconds and over.item() > args.seconds:
            continue
        found, wrong, left_out = run_setting(setting, args, device)
        rows += found
        failed |= bool(wrong)
        if rank == 0:
            show(found, wrong, left_out)
            write(args, rows, command)
    dist.destroy_process_group()
    if failed:
        raise SystemExit(1)


def write(args: argparse.Namespace, rows: list[dict[str, Any]], command: str) -> None:
    meta = describe(command, args.commit)
    meta["max_connections"] = os.environ.get(MAX_CONNECTIONS)
    if args.device == "cuda":
        meta["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    write_record(args.record, meta, rows)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = options(argv)
    if args.device == "cuda" and (found := torch.cuda.device_count()) < args.ranks:
        print(f"{args.ranks} GPUs are needed, got {found}; use --device cpu", file=sys.stderr)
        return 2
    args.impls = importable(args.impls)
    choose_kernel(args.impls)
    command = "python -m benchmarks.distributed.attn " + " ".join(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.start_processes(
                serve,
                (args, f"{folder}/store", command),
                args.ranks,
                start_method="spawn" if args.device == "cuda" else "forkserver",
            )
        except torch.multiprocessing.ProcessExitedException as error:
            return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
