"""Our fused parts beside those of libraries, and what each is of a training step.

    python -m benchmarks.train.parts --record FILE.json [--parts qkv_rope] [--without te,liger]

A call computes a part of one microbatch, forward and backward through autograd, in bf16; the
defaults are the shapes of the 1B recipe. Every implementation is compared with fp32 and then timed,
in random order in every round. TransformerEngine and liger-kernel take part if they can be
imported; who fails is named and left out. Needs one GPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.cell import Call
from benchmarks.lib.command import command_line
from benchmarks.lib.options import at_least, list_of, new_file, one_of
from benchmarks.lib.record import Record, describe
from benchmarks.lib.timing import Budget, Ready, difference, ready, time_calls
from benchmarks.train.part_cases import PARTS, Sizes, Tensors
from benchmarks.train.part_impls import IMPLS, OURS, Make
from benchmarks.train.part_rivals import RIVALS
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser, UsageError

ALL = {part: IMPLS[part] | RIVALS[part] for part in PARTS}
OTHERS = sorted({impl for impls in ALL.values() for impl in impls} - {OURS})
MOST_DIFFERENCE = 0.01
"""Relative, in norm. Losses in bf16 and rounded sines differ by a few thousandths."""
LONGEST_S = 600.0
SPIN_CYCLES = 4_000_000  # 2 ms: a call has up to a hundred launches and little work
LIBRARIES = ("transformer-engine", "transformer-engine-torch", "liger-kernel", "megatron-core",
             "triton")  # fmt: skip


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--parts", type=list_of(one_of(list(PARTS))), default=list(PARTS))
    parser.add_argument("--without", type=list_of(one_of(OTHERS)), default=[])
    for field in fields(Sizes):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=at_least(1), default=field.default)
    parser.add_argument("--microbatches", type=at_least(1), default=16, help="of a step")
    parser.add_argument("--step-ms", type=at_least(1), default=1964, help="time of a whole step")
    parser.add_argument("--rounds", type=at_least(20), default=40)
    parser.add_argument("--record", type=new_file)
    parser.add_argument("--commit", help="for the record, where there is no git")
    args = parser.parse_args(argv)
    if args.heads % args.groups or args.head_dim % 2:
        parser.error(
            f"--groups must divide --heads and 2 must divide --head-dim, got {args.groups} for "
            f"{args.heads} and {args.head_dim}"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    args = options(argv)
    if not torch.cuda.is_available():
        raise UsageError("a CUDA GPU is needed to time the parts, got none; run this on one")
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})
    more = {"sizes": asdict(sizes), "microbatches": args.microbatches, "step_ms": args.step_ms}
    record = Record(args.record, describe(command_line(), args.commit) | versions() | more)
    for part in args.parts:
        for row in measured(part, sizes, args):
            print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            record.rows.append(row)
        record.write()
    for line in compared(record.rows, args.step_ms):
        print(line)
    record.finish(describe(command_line(), args.commit))
    return 0


def versions() -> dict[str, Any]:
    """Those of the libraries that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"versions": found}


def measured(part: str, sizes: Sizes, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a part."""
    torch.manual_seed(0)
    makes = {impl: make for impl, make in ALL[part].items() if impl not in args.without}
    cell, differences = prepared(part, sizes, makes)
    times = time_calls(cell, Budget(args.rounds, LONGEST_S, SPIN_CYCLES))
    calls = PARTS[part].calls(sizes) * args.microbatches
    return [
        {"part": part, "impl": impl} | figures(times[impl], calls) | agreement(differences[impl])
        for impl in cell
    ]


def prepared(
    part: str, sizes: Sizes, makes: dict[str, Make]
) -> tuple[dict[str, Ready], dict[str, float]]:
    """Implementations that are ready to be timed, and how far they are from fp32."""
    cell: dict[str, Ready] = {}
    differences: dict[str, float] = {}
    inputs = PARTS[part].inputs(sizes, "cuda")
    exact = PARTS[part].exact(sizes, inputs)
    for impl, make in makes.items():
        try:
            call, differences[impl] = tried(make, sizes, inputs, exact)
            cell[impl] = replace(ready([call]), outputs=())  # those of a loss are gigabytes
        except Exception as error:  # a library that cannot run here must not end the run
            if impl == OURS:
                raise
            said = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"{part} without {impl}: {said[:300]}", file=sys.stderr, flush=True)
    return cell, differences


def tried(
    make: Make, sizes: Sizes, inputs: Tensors, exact: tuple[Tensor, ...]
) -> tuple[Call, float]:
    """The call, on inputs of its own, and the difference of its first results from fp32."""
    call = make(sizes, {name: x.clone() for name, x in inputs.items()})
    return call, difference(call(), exact)


def figures(times: list[float], calls_per_step: int) -> dict[str, Any]:
    """Milliseconds of a call, and of a step's calls."""
    ms = statistics.median(times)
    return {
        "ms": round(ms, 4), "min_ms": round(min(times), 4), "max_ms": round(max(times), 4),
        "n": len(times), "calls_per_step": calls_per_step,
        "ms_per_step": round(ms * calls_per_step, 2),
    }  # fmt: skip


def agreement(off: float) -> dict[str, Any]:
    """The difference, which JSON has only if it is finite, and whether it is rounding."""
    finite = round(off, 5) if math.isfinite(off) else None
    return {"difference": finite, "agrees": off < MOST_DIFFERENCE}


def compared(rows: list[dict[str, Any]], step_ms: float) -> Iterable[str]:
    """A line for each part: ours, and the fastest other whose results are right."""
    for part in dict.fromkeys(row["part"] for row in rows):
        found = {r["impl"]: r["ms_per_step"] for r in rows if r["part"] == part and r["agrees"]}
        ours = found.pop(OURS, None)
        if ours is None or not found:
            yield f"{part}: nothing to compare, as only {', '.join(found) or OURS} can be used"
            continue
        best = min(found, key=lambda impl: found[impl])
        yield (
            f"{part}: ours {share(ours, step_ms)}, {best} {share(found[best], step_ms)}, "
            f"difference {share(found[best] - ours, step_ms)}"
        )


def share(ms: float, step_ms: float) -> str:
    """Milliseconds of a step, and percent of it."""
    return f"{ms:.1f} ms ({100 * ms / step_ms:.2f} %)"


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
