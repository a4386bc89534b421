"""Training speed of the 1B recipe with and without the fused parts, on the GPUs of one host.

    python -m benchmarks.train.trainer --data PREFIX --record FILE.json [--cases fused_off,auto]

Each case is a process group of its own; cases of one GPU run side by side. tokens/s, MFU (visible
cells, dense bf16 rate) and memory are medians over the steps after the second; losses are kept, so
that equal work is seen to be equal.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.command import command_line
from benchmarks.lib.options import at_least, list_of, new_file, one_of
from benchmarks.lib.record import describe
from benchmarks.train.trainer_kernels import profile_last_step
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser

ROOT = Path(__file__).parents[2]
COLUMNS = ("lm_loss", "grad_norm", "step_seconds", "tokens_per_second", "mfu", "memory_gib")


@dataclass(frozen=True)
class Case:
    """Overrides of llama3_1b_1gpu, and parts that are forced instead of chosen."""

    gpus: int
    overrides: tuple[str, ...] = ()
    parts: str = ""
    """FusedParts fields as "name=value,...", for alternatives that a recipe cannot choose."""


CP2 = ("parallel.cp=2", "parallel.distributed_optimizer=true", "parallel.overlap_grad_reduce=true")
TP2 = ("parallel.tp=2", "parallel.sequence_parallel=true")
CASES = {
    "fused_off": Case(1, ("model.fused=off",)),
    "auto": Case(1),
    "megatron_flags": Case(1, parts="native_loss,swiglu=megatron"),
    "no_weight_grad": Case(
        1, parts="cross_entropy=triton,swiglu=megatron,qkv_rope=triton,weight_grad=plain"
    ),
    "flex_plain": Case(1, ("attention=flex_plain", "model.fused=off")),
    "flex_plain_auto": Case(1, ("attention=flex_plain",)),
    "cp2_16k_auto": Case(2, (*CP2, "data.seq_length=16384", "train.global_batch_size=16")),
    "cp2_16k_off": Case(
        2, (*CP2, "data.seq_length=16384", "train.global_batch_size=16", "model.fused=off")
    ),
    "cp2_8k_auto": Case(2, CP2),
    "cp2_8k_all_to_all": Case(2, (*CP2, "magi.transport=all_to_all")),
    "tp2_auto": Case(2, TP2),
    "tp2_off": Case(2, (*TP2, "model.fused=off")),
}


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="prefix of a corpus of Llama-3 tokens")
    parser.add_argument("--record", type=new_file)
    parser.add_argument("--recipe", default="llama3_1b_1gpu")
    parser.add_argument("--cases", type=list_of(one_of(list(CASES))), default=list(CASES))
    parser.add_argument("--steps", type=at_least(1), default=6)
    parser.add_argument("--gpus", type=at_least(1), default=2)
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--profile", action="store_true", help="add the last step's kernels")
    parser.add_argument("--child", nargs=2, metavar=("PARTS", "RECIPE"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args, args.overrides)
    names = args.cases
    random.shuffle(names)
    results = run_all(sorted(names, key=lambda n: CASES[n].gpus), args)
    for name, result in results.items():
        print(name, {k: v for k, v in result.items() if k not in ("raw", "profile")}, flush=True)
        for kernel in result.get("profile", {}).get("kernels", ()):
            print("  {ms:9.2f} ms {calls:6} {name}".format(**kernel))
        for gap in result.get("profile", {}).get("gaps", ()):
            print("  {ms:9.2f} ms idle between {after} and {before}".format(**gap))
    if args.record:
        meta = {**describe(command_line(), args.commit), "steps": args.steps}
        rows = [{"name": name, **result} for name, result in results.items()]
        args.record.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    return 0 if all("tokens_per_second" in r for r in results.values()) else 1


def run_all(names: list[str], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Cases one after another, those of one GPU side by side."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while names:
            width = args.gpus if CASES[names[0]].gpus == 1 else 1
            group = [n for n in names[:width] if CASES[n].gpus == CASES[names[0]].gpus]
            names = names[len(group) :]
            started = [start(n, i, folder, args) for i, n in enumerate(group)]
            for name, process in zip(group, started, strict=True):
                output, _ = process.communicate()
                results[name] = read(Path(folder) / name / "steps.csv", output)
    return results


def start(name: str, gpu: int, folder: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start one case."""
    case = CASES[name]
    visible = str(gpu) if case.gpus == 1 else ",".join(str(g) for g in range(case.gpus))
    overrides = (
        *("train.global_batch_size=16", f"data.path={args.data}", f"log.dir={folder}"),
        *(f"name={name}", f"train.iterations={args.steps}", "optimizer.warmup_iters=0"),
        *("validation.interval=null", "log.progress=false", "log.interval=1", *case.overrides),
    )
    flags = ["--profile"] if args.profile else []
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.train.trainer", "--data", args.data, *flags,
         "--child", case.parts or "-", args.recipe, *overrides],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def read(path: Path, output: str) -> dict[str, Any]:
    """Medians and raw columns of a case; the end of its output where it has none."""
    rows = list(csv.DictReader(path.open())) if path.is_file() else []
    if len(rows) < 3:
        return {"error": output[-3000:]}
    raw = {c: [float(r[c] or "nan") for r in rows] for c in COLUMNS}
    medians = {c: statistics.median(raw[c][2:]) for c in COLUMNS[2:]}
    said = [line for line in output.splitlines() if line.startswith(("fused:", "magi |"))]
    kernels = path.parent / "kernels.json"
    profile = {"profile": json.loads(kernels.read_text())} if kernels.is_file() else {}
    return {**medians, "said": said, **profile, "raw": raw}


def child(args: argparse.Namespace, overrides: list[str]) -> int:
    """One case: `megatron-magi train`, with other parts than it would choose if they are given."""
    from functools import partial

    from megatron_magi.training.process.processes import run_local
    from megatron_magi.training.recipe.recipe import load_recipe

    parts, recipe = args.child
    config = load_recipe(recipe, overrides)
    return run_local(partial(rank, parts, args.profile, config), config.parallel.num_processes)


def rank(parts: str, with_profile: bool, config: Any, place: Any) -> None:
    """One process of a case."""
    from megatron_magi.cli.train import run_rank

    if parts != "-":
        force(parts)
    if with_profile:
        profile_last_step(config, place.rank)
    run_rank(config, place)


def force(parts: str) -> None:
    """Make the model take these parts."""
    from megatron_magi.adapter.fused.parts import FusedParts
    from megatron_magi.training.run import log, model

    words = parts.split(",")
    fields = dict(word.split("=") for word in words if "=" in word)

    class Forced(FusedParts):
        def config_fields(self) -> dict[str, Any]:
            native = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
            return super().config_fields() | (native if "native_loss" in words else {})

    for module in (model, log):
        module.choose_parts = lambda setting: Forced(**fields)


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
