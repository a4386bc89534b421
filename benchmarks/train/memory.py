"""GPU memory of real training steps, beside the estimate of `pretrain.py --dry-run`.

    python -m benchmarks.train.memory                          # all cases this machine can hold
    python -m benchmarks.train.memory --ranks 2 --record FILE  # the cases of two GPUs
    python -m benchmarks.train.memory --cases 1b_8k,1b_16k_cp2

A case is a recipe with overrides. Its ranks, one process per GPU, train four steps on packed random
documents with the CUDA kernel and report what torch's allocator gave out. The record is written
after every case. Exit code 1: the estimate of a rank's peak is off by more than 15 %, or a case did
not finish; 2: nothing can run. tokens/s are for information.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.train.memory_parts import parts
from benchmarks.train.memory_run import Facts, pack_documents, run_case
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.training.estimate.dry_run import dry_run
from megatron_magi.training.estimate.memory import RankMemory
from megatron_magi.training.recipe.recipe import load_recipe
from megatron_magi.training.recipe.run_config import RunConfig

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.15
COMMON = (
    *("parallel.cp=1", "optimizer.warmup_iters=0", "magi.kernel_backend=cuda"),
    *("data.eod_token=256", "train.global_batch_size=2", "train.iterations=4"),
)
SMALL = (
    *("model.num_layers=16", "model.hidden_size=1024", "model.ffn_hidden_size=4096"),
    *("model.num_attention_heads=8", "model.num_query_groups=4"),
)
TP2 = ("parallel.tp=2", "parallel.sequence_parallel=true")
COLUMNS = ("weights+grads", "optimizer", "step", "peak")


@dataclass(frozen=True)
class Case:
    """Overrides of llama3_1b_4gpu_cp4: 1.24 B parameters, distributed optimizer, bf16."""

    name: str
    ranks: int
    seq_length: int
    overrides: tuple[str, ...] = ()

    def config(self, data: Path) -> RunConfig:
        where = (f"name={self.name}", f"data.path={data}", f"data.seq_length={self.seq_length}")
        recipe = ROOT / "recipes" / "own_trainer" / "llama3_1b_4gpu_cp4.yaml"
        return load_recipe(recipe, [*COMMON, *where, *self.overrides])


CASES = (
    Case("1b_8k", 1, 8192),
    Case("0.4b_32k", 1, 32768, SMALL),
    Case("1b_32k_recompute", 1, 32768, ("train.recompute=full",)),
    Case("0.4b_8k", 1, 8192, SMALL),
    Case("1b_16k_cp2", 2, 16384, ("parallel.cp=2",)),
    Case("1b_8k_tp2", 2, 8192, TP2),
    Case("0.4b_32k_cp2", 2, 32768, (*SMALL, "parallel.cp=2")),
)


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", help=f"of {','.join(c.name for c in CASES)}")
    parser.add_argument("--ranks", type=int, help="only cases of so many GPUs")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a case (%(default)s)")
    parser.add_argument(
        "--record", type=Path, help="default benchmarks/records/memory_<gpu>_<date>.json"
    )
    parser.add_argument("--commit", help="for the record, where there is no git repository")
    return parser.parse_args(argv)


def chosen_cases(args: argparse.Namespace, num_gpus: int) -> list[Case]:
    """The cases asked for that this machine has the GPUs for.

    Raises:
        ValueError: an unknown name, or nothing to run.
    """
    names = args.cases.split(",") if args.cases else [c.name for c in CASES]
    unknown = set(names) - {c.name for c in CASES}
    if unknown:
        raise ValueError(f"cases must be of {[c.name for c in CASES]}, got {sorted(unknown)}")
    if num_gpus == 0:
        raise ValueError("a CUDA GPU is needed to measure its memory, got none; run it on one")
    asked = [c for c in CASES if c.name in names and args.ranks in (None, c.ranks)]
    cases = [c for c in asked if c.ranks <= num_gpus]
    if not cases:
        named = [f"{c.name} ({c.ranks} GPUs)" for c in asked]
        raise ValueError(f"no case fits {num_gpus} GPUs, got {named}; choose others with --cases")
    return cases


def row(case: Case, estimate: RankMemory, measured: Facts) -> dict[str, Any]:
    """One rank's line of the record; bytes."""
    return {
        "config": case.name,
        "ranks": case.ranks,
        "rank": measured["rank"],
        "seq_length": case.seq_length,
        "overrides": list(case.overrides),
        "estimate": {**vars(estimate), "total": estimate.total},
        "measured": {k: v for k, v in measured.items() if k != "rank"},
        "ratio": round(estimate.total / measured["peak"], 4),
    }


def misses(rows: list[dict[str, Any]], cases: list[Case]) -> list[str]:
    """What is wrong, in words: ratios outside the tolerance, ranks without a result."""
    found = [
        f"{r['config']} rank {r['rank']}: the estimate is {r['ratio']:.3f} of the measured peak"
        for r in rows
        if not abs(r["ratio"] - 1) <= TOLERANCE
    ]
    for case in cases:
        number = sum(r["config"] == case.name for r in rows)
        if number < case.ranks:
            found.append(f"{case.name}: {number} of {case.ranks} ranks finished")
    return found


def lines(r: dict[str, Any]) -> list[str]:
    """A row for the screen, in GiB: the estimate above what was measured."""
    m = r["measured"]
    estimated, measured = zip(*parts(r), strict=True)
    note = (
        f"  ratio {r['ratio']:.3f}, peak of the update {m['peak_update'] / 2**30:.2f}, reserved "
        f"{m['reserved'] / 2**30:.2f}, loss {m['loss']:.3f}, {m['tokens_per_second']:,} tokens/s"
    )
    return [
        f"{r['config'] + ' rank ' + str(r['rank']):<26}" + "".join(f"{n:>15}" for n in COLUMNS),
        f"{'  estimated':<26}" + "".join(f"{n / 2**30:>15.3f}" for n in estimated),
        f"{'  measured':<26}" + "".join(f"{n / 2**30:>15.3f}" for n in measured),
        note,
    ]


def describe(argv: list[str], commit: str | None) -> dict[str, Any]:
    """The machine and the versions, for the record."""
    from megatron_magi.adapter.compat import installed_version

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    smi = subprocess.run(query, capture_output=True, text=True, check=True)
    gpu, driver = (x.strip() for x in smi.stdout.splitlines()[0].split(","))
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return {
        "gpu": gpu, "driver": driver, "torch": torch.__version__, "cuda": torch.version.cuda,
        "megatron_core": str(installed_version()),
        "commit": commit or subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "command": " ".join(["python -m benchmarks.train.memory", *argv]),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def default_record(meta: dict[str, Any]) -> Path:
    gpu = re.sub(r"[^a-z0-9]+", "_", meta["gpu"].lower().removeprefix("nvidia ")).strip("_")
    return ROOT / "benchmarks" / "records" / f"memory_{gpu}_{meta['date']}.json"


def main(argv: list[str] | None = None) -> int:
    """Run the cases, print a table, write the record."""
    argv = sys.argv[1:] if argv is None else argv
    args = options(argv)
    try:
        cases = chosen_cases(args, torch.cuda.device_count())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    meta, rows = describe(argv, args.commit), []
    path = args.record or default_record(meta)
    with tempfile.TemporaryDirectory(prefix="bench-memory-data-") as folder:
        data = Path(folder) / "data"
        pack_documents(data)
        for case in cases:
            config = case.config(data)
            estimate = dry_run(config, case.ranks).memory[0]
            found = [row(case, estimate, m) for m in run_case(config, case.ranks, args.limit)]
            rows += found
            print("\n".join(line for r in found for line in lines(r)), flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    wrong = misses(rows, cases)
    print("\n".join([f"wrote {path}", *(f"WRONG {what}" for what in wrong)]), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
