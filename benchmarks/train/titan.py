"""torchtitan's Llama on packed documents under context parallelism: ours beside its own.

    torchrun --nproc-per-node 2 -m benchmarks.train.titan --torchtitan CHECKOUT --record FILE.json

CHECKOUT is a source tree of torchtitan; the packages that its import asks for must be there. The
ways to attend, each with a model, an optimizer and a trainer (torchtitan's) of its own:
  ours        examples/torchtitan/magi.py
  headtail    torchtitan's FlexAttention, which gathers all keys, with its default load balancer
  ptrr        the same with its load balancer by the blocks of the mask
  unbalanced  the same without one
Steps of all ways come in random order, round after round, on the same samples, a new one for every
round; the median of the slowest rank's times is reported. The losses of the first steps must agree.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.lib.command import command_line
from benchmarks.lib.masks import SHORT_DOCS, documents
from benchmarks.lib.options import at_least, list_of, new_file
from benchmarks.lib.packed import Packed, packed, shuffled
from benchmarks.lib.record import describe
from benchmarks.lib.steps import figures, timed
from benchmarks.lib.timing import rounds
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser, positive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM_ROUNDS = 3
COMPARED_STEPS = 10
MOST_DIFFERENCE = 5e-3
"""Of two ways' losses in one step, relative."""


def drawn_sample(seed: int, length: int, vocab: int) -> Packed:
    """Documents of lognormal lengths in a random order; their words are as frequent as in texts,
    so that a model learns something in its first steps."""
    rng = np.random.default_rng(seed)
    tokens = rng.zipf(1.2, length) % vocab
    return packed(tokens, shuffled(rng, documents(SHORT_DOCS, length)))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every way."""
    from benchmarks.train import titan_trainer as titan

    num_ranks, size, length = dist.get_world_size(), titan.Size.on(DEVICE), options.length
    dims = titan.dims_of(num_ranks, DEVICE)
    runs = {
        way: titan.Run(titan.configuration(way, size, length, num_ranks), dims, DEVICE)
        for way in options.ways
    }
    times: dict[str, list[float]] = {way: [] for way in options.ways}
    received: dict[str, list[tuple[list[int], int]]] = {way: [] for way in options.ways}
    spent_ms = 0.0
    for turn, way in rounds(options.ways, WARM_ROUNDS + options.rounds):
        begins = len({len(each) for each in times.values()}) == 1
        if begins and turn > WARM_ROUNDS and spent_ms > 1e3 * options.limit_s:
            break
        sample, run = drawn_sample(turn, length, size.vocab), runs[way]
        ms, _ = timed(functools.partial(run.step, sample), DEVICE)
        spent_ms += ms
        if turn >= WARM_ROUNDS:
            times[way].append(ms)
            received[way].append(run.rows)
        tell(f"round {turn} {way}: {ms:.1f} ms, loss {run.losses[-1]:.4f}")
    losses = {way: run.losses[:COMPARED_STEPS] for way, run in runs.items()}
    return [
        {"way": way, "length": length, **figures(times[way], length), **counts(received[way]),
         **compared(losses[way], losses[options.ways[0]])}
        for way in options.ways
    ]  # fmt: skip


def counts(received: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Key rows that each rank received and rows of padding, in the mean over steps."""
    rows, padding = zip(*received, strict=True)
    return {
        "rows_received": np.mean(rows, 0).round(1).tolist(),
        "padding": round(float(np.mean(padding)), 1),
    }


def compared(losses: list[float], first: list[float]) -> dict[str, Any]:
    """The losses beside those of the first way."""
    differences = [abs(a / b - 1) for a, b in zip(losses, first, strict=True)]
    return {
        "losses": [round(x, 5) for x in losses],
        "largest_difference": max(differences),
        "agrees": max(differences) < MOST_DIFFERENCE,
    }


def tell(line: object) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def find_torchtitan(checkout: Path) -> None:
    """Put it on the path; let releases of torch stand for the nightly builds that it asks for."""
    from torch.distributed import fsdp

    if not hasattr(fsdp, "DataParallelMeshDims"):  # before torch 2.12; imported, and not used here
        fsdp.DataParallelMeshDims = object
    sys.path.insert(0, str(checkout))


def parse() -> argparse.Namespace:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torchtitan", type=Path, required=True, help="its source tree")
    parser.add_argument("--torchtitan-commit", help="of that tree, for the record")
    parser.add_argument("--ways", type=list_of(str), default=["ours", "headtail", "ptrr"])
    parser.add_argument("--length", type=at_least(256, 256), default=16384, help="tokens of a step")
    parser.add_argument("--rounds", type=at_least(1), default=15)
    parser.add_argument(
        "--limit-s", type=positive, default=1e9, help="of steps: begin no round after it"
    )
    parser.add_argument("--record", type=new_file)
    parser.add_argument("--commit")
    options = parser.parse_args()
    if not (options.torchtitan / "torchtitan" / "trainer.py").is_file():
        parser.error(f"--torchtitan needs a source tree of torchtitan, got {options.torchtitan}")
    return options


def main() -> int:
    options = parse()
    find_torchtitan(options.torchtitan)
    from benchmarks.train.titan_trainer import Size

    if DEVICE == "cuda":
        torch.cuda.set_device(int(dist.get_node_local_rank(0)))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    rows = measure(options)
    for row in rows:
        tell(row)
    if options.record and dist.get_rank() == 0:
        meta = {
            **describe(command_line(), options.commit), "ranks": dist.get_world_size(),
            "torchtitan": options.torchtitan_commit, "size": asdict(Size.on(DEVICE)),
        }  # fmt: skip
        options.record.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()
    return 0 if all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(guarded(main))
