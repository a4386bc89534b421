"""What one attention kernel issues and moves, by the GPU's counters (Nsight Compute).

    python -m benchmarks.kernel.counters --impls ours,fa3 --seqlens 16384 --record counters.json

Each cell is a process of its own under `ncu`, which counts the longest kernel of one call; inputs
and peers are those of benchmarks.kernel.speed. `ncu` runs a kernel again for every group of
counters, each time from cold caches, and the clocks stay as they are. "million_steps" is the
visible area in tiles of 64 x 128 cells of one head, in millions. Needs one Hopper GPU and ncu.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import shutil
import subprocess
import sys
from typing import Any

import torch

from benchmarks.kernel.peers import all_peers
from benchmarks.lib.cell import Case, Inputs
from benchmarks.lib.masks import MASKS
from benchmarks.lib.options import at_least, list_of, new_file, one_of
from benchmarks.lib.record import describe, write_record
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.kernel.head_dims import HeadDims

COUNTERS = {
    "ns": "gpu__time_duration.sum",
    "clocks": "gpc__cycles_elapsed.max",
    "instructions": "smsp__inst_executed.sum",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "alu_percent": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "fma_percent": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exp2_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_sectors": "lts__t_sectors.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
}
"""Of a kernel, over all SMs; a percentage is of what the unit can do in the kernel's time."""
STEP_CELLS = 64 * 128


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--impls", type=list_of(str), default=["ours"])
    parser.add_argument("--masks", type=list_of(one_of(list(MASKS))), default=["full"])
    parser.add_argument("--seqlens", type=list_of(at_least(1)), default=[16384])
    parser.add_argument("--directions", type=list_of(one_of(("fwd", "bwd"))), default=["bwd"])
    parser.add_argument("--head-dims", type=list_of(at_least(1)), default=[128])
    parser.add_argument("--heads", type=list_of(at_least(1)), default=[64, 8])
    parser.add_argument("--record", type=new_file)
    parser.add_argument("--commit", help="for the record, where there is no git")
    parser.add_argument("--call", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def call_once(args: argparse.Namespace) -> None:
    """The call that is counted, in a process under ncu, after one that is not."""
    (impl,), (head_dim,), (seqlen,) = args.impls, args.head_dims, args.seqlens
    peer, case = all_peers()[impl], Case(args.masks[0], seqlen)
    widths = HeadDims(head_dim, head_dim)
    call = peer.call(case, args.directions[0], Inputs.random(seqlen, tuple(args.heads), widths))
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def count(cell: dict[str, Any]) -> dict[str, Any]:
    """Counters of the longest kernel of a cell's call.

    Raises:
        SystemExit: ncu counted no kernel.
    """
    words = [f"--{name}={value}" for name, value in cell.items()]
    ncu = ["ncu", "--csv", "--page", "raw", "--profile-from-start", "off", "--clock-control=none"]
    this = [sys.executable, "-m", "benchmarks.kernel.counters", "--call", *words]
    metrics = ["--metrics", ",".join(COUNTERS.values())]
    done = subprocess.run([*ncu, *metrics, *this], capture_output=True, text=True, check=False)
    table = done.stdout[max(0, done.stdout.find('"ID"')) :]
    kernels = [row for row in csv.DictReader(io.StringIO(table)) if row["ID"]]
    if not kernels:
        raise SystemExit(f"ncu counted no kernel of {cell}; it said:\n{done.stdout}{done.stderr}")
    counted = max(kernels, key=lambda kernel: number(kernel[COUNTERS["ns"]]))
    found = {name: number(counted[metric]) for name, metric in COUNTERS.items()}
    return {"kernel": counted["Kernel Name"][:60], **found}


def number(text: str) -> float:
    return float(text.replace(",", ""))


def main(argv: list[str] | None = None) -> None:
    args = options(argv)
    if args.call:
        call_once(args)
        return
    if shutil.which("ncu") is None:
        raise SystemExit("Nsight Compute is required, got no ncu on the PATH; install it")
    words = sys.argv[1:] if argv is None else argv
    meta = describe("python -m benchmarks.kernel.counters " + " ".join(words), args.commit)
    names = ("directions", "head-dims", "masks", "seqlens", "impls")
    given = [vars(args)[name.replace("-", "_")] for name in names]
    rows = []
    for values in itertools.product(*given):
        cell = dict(zip(names, values, strict=True))
        area = Case(cell["masks"], cell["seqlens"]).mask.area()
        steps = round(area * args.heads[0] / STEP_CELLS / 1e6, 4)
        heads = {"heads": ",".join(map(str, args.heads))}
        rows.append({**cell, "million_steps": steps, **count(cell | heads)})
        print(cell, rows[-1]["ns"], flush=True)
        write_record(args.record, meta, rows)


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
