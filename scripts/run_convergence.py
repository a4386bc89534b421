#!/usr/bin/env python3
"""The runs behind docs/convergence.md, two GPUs wide: curves, noise floors, negative controls.

    python scripts/run_convergence.py --data data/linux_llama3 --out OUT --work WORK b_documents
    python scripts/run_convergence.py --list

A set is a list of runs; a run takes one GPU or two and starts when they are free. Curves, recipes
and gradient norms go to OUT; checkpoints and gradients stay in WORK, where later sets find them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEPT = ("steps.csv", "recipe.yaml", "gradient_errors.csv", "log.txt")


@dataclass(frozen=True)
class Run:
    """A training run: a recipe with overrides."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    gpus: int = 1
    error: str | None = None
    """A negative control of tests/convergence/broken_train.py."""

    def command(self, data: str, work: Path) -> list[str]:
        """Its command line."""
        program = ["-m", "megatron_magi", "train"]
        if self.error is not None:
            program = ["tests/convergence/broken_train.py", self.error]
        place = (f"name={self.name}", f"log.dir={work}", f"data.path={data}")
        filled = [o.replace("WORK", str(work)) for o in self.overrides]
        more = ("log.progress=false", "log.overwrite=true")
        return [sys.executable, *program, self.recipe, *place, *filled, *more]


PLAIN = ("attention=flex_plain",)
REVERSED = ("data.step_order=reversed",)
CP2 = ("parallel.cp=2",)
SHORT = ("train.iterations=60", "validation.interval=null")


def model_b() -> dict[str, list[Run]]:
    """The 180M model: every comparison, fused kernels off on both sides."""
    steps = ("optimizer.decay_iters=500", "train.dump_gradients=[1]")
    common = ("model.fused=off", "parallel.distributed_optimizer=true", *steps)

    def run(name: str, *more: str, gpus: int = 1, error: str | None = None) -> Run:
        return Run(f"b_{name}", "llama3_180m_1gpu", (*common, *more), gpus, error)

    saving = ("checkpoint.interval=300", "checkpoint.keep=null")
    causal = ("data.mask=causal",)
    from_300 = (
        *("checkpoint.load=WORK/b_flex/checkpoints/iter_0000300", "train.iterations=301"),
        *("train.dump_gradients=[301]", "validation.interval=null"),
    )
    first = ("train.iterations=1", "validation.interval=null")
    gates = [
        ("flex", PLAIN, 1, None),
        ("noise", (*PLAIN, *REVERSED), 1, None),
        ("sdpa", ("attention=sdpa",), 1, None),
        ("magi_cp1", (), 1, None),
        ("magi_cp2", CP2, 2, None),
        ("moved_1", ("data.moved_boundary=1",), 1, None),
        ("moved_16", ("data.moved_boundary=16",), 1, None),
        ("moved_256", ("data.moved_boundary=256",), 1, None),
        ("tile", (), 1, "tile"),
        ("partial", CP2, 2, "partial"),
    ]
    return {
        "b_documents": [
            run("flex", *PLAIN, *saving),
            run("noise", *PLAIN, *REVERSED),
            run("magi_cp1"),
            run("magi_cp1_again"),
            run("magi_cp2", *CP2, gpus=2),
        ],
        "b_gates_300": [run(f"300_{n}", *from_300, *o, gpus=g, error=e) for n, o, g, e in gates],
        "b_noise_1": [run("1_sdpa", *first, "attention=sdpa")],
        "b_gates_1": [run(f"1_{n}", *first, *o, gpus=g, error=e) for n, o, g, e in gates],
        "b_causal": [
            run("sdpa_causal", "attention=sdpa", *causal),
            run("sdpa_causal_noise", "attention=sdpa", *REVERSED, *causal),
            run("magi_causal_cp1", *causal),
            run("magi_causal_cp2", *causal, *CP2, gpus=2),
        ],
        "b_controls": [
            run("control_moved_1", "data.moved_boundary=1", *SHORT),
            run("control_moved_16", "data.moved_boundary=16", *SHORT),
            run("control_moved_256", "data.moved_boundary=256", *SHORT),
            run("control_tile", *SHORT, error="tile"),
            run("control_partial", *SHORT, *CP2, gpus=2, error="partial"),
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", help="names of sets, or of single runs")
    parser.add_argument("--data", default="data/linux_llama3", help="prefix of the packed corpus")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence_record"))
    parser.add_argument("--work", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="show the sets and stop")
    args = parser.parse_args()
    sets = model_b()
    if args.list:
        print(
            "\n".join(f"{name}: {', '.join(r.name for r in runs)}" for name, runs in sets.items())
        )
        return 0
    known = {r.name: [r] for runs in sets.values() for r in runs} | sets
    unknown = [name for name in args.sets if name not in known]
    if unknown:
        parser.error(f"sets must be named by --list, got {', '.join(unknown)}")
    runs = [run for name in args.sets for run in known[name]]
    wide = [f"{run.name} needs {run.gpus} GPUs" for run in runs if run.gpus > args.gpus]
    if wide:
        parser.error(f"a run must fit --gpus {args.gpus}, got {', '.join(wide)}")
    failed = run_all(runs, args)
    print(f"{len(runs) - len(failed)} of {len(runs)} runs ended well; failed: {failed}")
    return 1 if failed else 0


def run_all(runs: list[Run], args: argparse.Namespace) -> list[str]:
    """Run in order, as many at a time as there are GPUs; names of the runs that failed."""
    free, waiting, failed = set(range(args.gpus)), list(runs), []
    active: list[tuple[Run, subprocess.Popen[bytes], set[int], float]] = []
    while waiting or active:
        while waiting and len(free) >= waiting[0].gpus:
            run = waiting.pop(0)
            mine = set(sorted(free)[: run.gpus])
            free -= mine
            active.append((run, start(run, mine, args), mine, time.time()))
        time.sleep(0.2)
        for job in [job for job in active if job[1].poll() is not None]:
            active.remove(job)
            run, process, mine, begin = job
            free |= mine
            keep(run, args, process.returncode, time.time() - begin)
            if process.returncode:
                failed.append(run.name)
    return failed


def start(run: Run, gpus: set[int], args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a run on these GPUs; its output goes to its folder."""
    folder = args.work / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    visible = ",".join(str(gpu) for gpu in sorted(gpus))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "8"}
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(
            run.command(args.data, args.work),
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def keep(run: Run, args: argparse.Namespace, code: int, seconds: float) -> None:
    """Copy what is small to the record, and say how the run ended."""
    source, target = args.work / run.name, args.out / run.name
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
    facts = {"name": run.name, "gpus": run.gpus, "seconds": round(seconds, 1), "exit_code": code}
    facts["command"] = " ".join(run.command(args.data, args.work)[1:])
    (target / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
    tail = (source / "log.txt").read_text(errors="replace").strip().splitlines()[-3:]
    print(f"{run.name}: exit {code} after {seconds:.0f} s\n  " + "\n  ".join(tail), flush=True)


if __name__ == "__main__":
    sys.exit(main())
