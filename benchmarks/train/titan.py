"""torchtitan's Llama on packed documents under context parallelism: magi compared with its own.

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
import inspect
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.lib.command import command_line, require_torchrun
from benchmarks.lib.masks import SHORT_DOCS, documents
from benchmarks.lib.options import at_least, list_of, new_file, positive
from benchmarks.lib.packed import Packed, packed, shuffled
from benchmarks.lib.record import describe, write_record
from benchmarks.lib.steps import figures, timed
from benchmarks.lib.timing import rounds
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser

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


class Results:
    """What the steps of every way took and did so far."""

    def __init__(self, runs: dict[str, Any], length: int) -> None:
        """
        Args:
            runs: of titan_trainer.Run, by way.
            length: tokens of a step.
        """
        self.runs, self.length = runs, length
        self.spent_ms = 0.0
        self._times: dict[str, list[float]] = {way: [] for way in runs}
        self._received: dict[str, list[tuple[list[int], int]]] = {way: [] for way in runs}

    def add(self, way: str, ms: float, warm: bool) -> None:
        """A step of this way; times of the first steps, which compile, do not count."""
        self.spent_ms += ms
        if warm:
            self._times[way].append(ms)
            self._received[way].append(self.runs[way].rows)

    @property
    def are_whole(self) -> bool:
        """Whether every way has had the same number of timed steps, and some."""
        lengths = {len(times) for times in self._times.values()}
        return len(lengths) == 1 and 0 not in lengths

    def rows(self) -> list[dict[str, Any]]:
        """One for every way, when the results are whole."""
        losses = {way: run.losses[:COMPARED_STEPS] for way, run in self.runs.items()}
        first = next(iter(losses.values()))
        return [
            {"way": way, "length": self.length, **figures(self._times[way], self.length),
             **counts(self._received[way]), **compared(losses[way], first)}
            for way in self.runs
        ]  # fmt: skip


def made_runs(options: argparse.Namespace) -> dict[str, Any]:
    """A model in training for every way."""
    from benchmarks.train import titan_trainer as titan

    num_ranks, size = dist.get_world_size(), titan.Size.on(DEVICE)
    configs = {
        way: titan.configuration(way, size, options.length, num_ranks) for way in options.ways
    }
    if not options.autotune:
        titan.compile_without_autotuning()
    dims = titan.dims_of(configs[options.ways[0]].parallelism, num_ranks, DEVICE)
    return {way: titan.Run(config, dims, DEVICE) for way, config in configs.items()}


def measure(
    options: argparse.Namespace, save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """A row for every way; ``save`` has them after every round, so that a run that was stopped
    leaves them."""
    runs = made_runs(options)
    vocab = runs[options.ways[0]].vocab
    results = Results(runs, options.length)
    for turn, way in rounds(options.ways, WARM_ROUNDS + options.rounds):
        if results.are_whole and results.spent_ms > 1e3 * options.limit_s:
            break
        step = functools.partial(runs[way].step, drawn_sample(turn, options.length, vocab))
        ms, _ = timed(step, DEVICE)
        results.add(way, ms, warm=turn >= WARM_ROUNDS)
        tell(f"round {turn} {way}: {ms:.1f} ms, loss {runs[way].losses[-1]:.4f}")
        if results.are_whole:
            save(results.rows())
    return results.rows()


def counts(received: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Key rows that each rank received and rows of padding, in the mean over steps."""
    rows, padding = zip(*received, strict=True)
    return {
        "rows_received": np.mean(rows, 0).round(1).tolist(),
        "padding": round(float(np.mean(padding)), 1),
    }


def compared(losses: list[float], first: list[float]) -> dict[str, Any]:
    """The losses compared with those of the first way."""
    differences = [abs(a / b - 1) for a, b in zip(losses, first, strict=True)]
    return {
        "losses": [round(x, 5) for x in losses],
        "largest_difference": max(differences),
        "agrees": max(differences) < MOST_DIFFERENCE,
    }


def tell(line: object) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def allow_releases_of_torch() -> None:
    """torchtitan asks for nightly builds: give torch 2.11 what it needs before its import."""
    from torch.distributed import fsdp
    from torch.nn.attention import flex_attention

    if not hasattr(fsdp, "DataParallelMeshDims"):  # imported, but for meshes of several axes only
        fsdp.DataParallelMeshDims = object
    create = flex_attention.create_block_mask
    if "separate_full_blocks" not in inspect.signature(create).parameters:
        flex_attention.create_block_mask = with_full_blocks_apart(create)


def with_full_blocks_apart(create: Callable[..., Any]) -> Callable[..., Any]:
    """Of torch 2.11, whose block masks are always of that kind."""

    def create_block_mask(*args: Any, separate_full_blocks: bool = True, **others: Any) -> Any:
        assert separate_full_blocks
        return create(*args, **others)

    return create_block_mask


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
    parser.add_argument(
        "--no-autotune", dest="autotune", action="store_false",
        help="compile FlexAttention without torchtitan's search for tiles, and no block masks",
    )  # fmt: skip
    parser.add_argument("--record", type=new_file)
    parser.add_argument("--commit")
    options = parser.parse_args()
    if not (options.torchtitan / "torchtitan" / "trainer.py").is_file():
        parser.error(f"--torchtitan needs a source tree of torchtitan, got {options.torchtitan}")
    return options


def recorder(options: argparse.Namespace) -> Callable[[list[dict[str, Any]]], None]:
    """What writes rows to the record, on the first rank."""
    if options.record is None or dist.get_rank() != 0:
        return lambda rows: None
    from benchmarks.train.titan_trainer import Size

    meta = {
        **describe(command_line(), options.commit), "ranks": dist.get_world_size(),
        "torchtitan": options.torchtitan_commit, "size": asdict(Size.on(DEVICE)),
    }  # fmt: skip
    return functools.partial(write_record, options.record, meta)


def main() -> int:
    options = parse()
    require_torchrun()
    sys.path.insert(0, str(options.torchtitan))
    allow_releases_of_torch()
    if DEVICE == "cuda":
        torch.cuda.set_device(int(dist.get_node_local_rank(0)))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    rows = measure(options, recorder(options))
    for row in rows:
        tell(row)
    dist.destroy_process_group()
    return 0 if all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
