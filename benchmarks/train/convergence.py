"""The runs behind docs/results/convergence.md: curves, noise floors, negative controls.

    python -m benchmarks.train.convergence --data PREFIX --out OUT --work WORK b_documents
    python -m benchmarks.train.convergence --gpus 0,1,2,3 --data ... a_baseline a_ours
    python -m benchmarks.train.convergence --list

A set is a list of runs; a run takes one GPU or two and starts when they are free. Curves, recipes
and gradient errors go to OUT; checkpoints and gradients stay in WORK, where later sets find them.
Without a set, --archive packs what `megatron-magi compare` has added since.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.train.convergence_sets import Run, all_sets
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from megatron_magi.training.data.packed_samples import check_files
from megatron_magi.training.recipe.run_values import DataConfig

ROOT = Path(__file__).parents[2]
KEPT = ("steps.csv", "recipe.yaml", "gradient_errors.csv", "log.txt")


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", help="names of sets, or of single runs")
    parser.add_argument("--data", default="data/linux_llama3", help="prefix of the packed corpus")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence_record"))
    parser.add_argument("--work", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--archive", type=Path, help="also pack the record into this .tar.xz")
    parser.add_argument("--gpus", type=gpu_numbers, default=(0, 1), help="numbers, default 0,1")
    parser.add_argument("--seconds", type=float, default=1e9, help="end what still runs then")
    parser.add_argument("--list", action="store_true", help="show the sets and stop")
    args = parser.parse_args()
    sets = all_sets()
    if args.list:
        print(
            "\n".join(f"{name}: {', '.join(r.name for r in runs)}" for name, runs in sets.items())
        )
        return 0
    runs = runs_of(args, sets, parser)
    failed = run_all(runs, args)
    if args.archive is not None:
        pack(args)
    print(f"{len(runs) - len(failed)} of {len(runs)} runs ended well; failed: {failed}")
    return 1 if failed else 0


def runs_of(
    args: argparse.Namespace, sets: dict[str, list[Run]], parser: CommandParser
) -> list[Run]:
    """The runs that are asked for; none if only --archive is.

    Raises:
        UsageError: nothing is asked for, or what is not there, or a run that needs more GPUs.
        RecipeError: the corpus is not there.
    """
    if not args.sets and args.archive is None:
        parser.error("a set to run is needed, or --archive, got neither; --list shows the sets")
    known = {r.name: [r] for runs in sets.values() for r in runs} | sets
    unknown = [name for name in args.sets if name not in known]
    if unknown:
        parser.error(f"sets must be named by --list, got {', '.join(unknown)}")
    runs = [run for name in args.sets for run in known[name]]
    most = len(args.gpus)
    wide = [f"{run.name} needs {run.gpus} GPUs" for run in runs if run.gpus > most]
    if wide:
        parser.error(f"a run must fit {most} GPUs of --gpus, got {', '.join(wide)}")
    if runs:
        check_files(DataConfig(path=str(ROOT / args.data)))  # a run starts in that folder
    return runs


@dataclass
class Job:
    """A run that has been started."""

    run: Run
    process: subprocess.Popen[bytes]
    gpus: set[int]
    began: float

    def end(self) -> None:
        """Now, with its worker processes; what it has written stays."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_all(runs: list[Run], args: argparse.Namespace) -> list[str]:
    """Run in order, as many at a time as there are GPUs; names of the runs that failed."""
    free, waiting, failed = set(args.gpus), list(runs), []
    active: list[Job] = []
    last = time.time() + args.seconds
    try:
        while waiting or active:
            while waiting and len(free) >= waiting[0].gpus and time.time() < last:
                run = waiting.pop(0)
                mine = set(sorted(free)[: run.gpus])
                free -= mine
                active.append(Job(run, start(run, mine, args), mine, time.time()))
            time.sleep(0.2)
            if time.time() >= last:
                failed, waiting = [*failed, *(run.name for run in waiting)], []
                for job in active:
                    job.end()
            for job in [job for job in active if job.process.poll() is not None]:
                active.remove(job)
                free |= job.gpus
                keep(job.run, args, job.process.returncode, time.time() - job.began)
                if job.process.returncode:
                    failed.append(job.run.name)
    finally:
        for job in active:
            job.end()
    return failed


def gpu_numbers(text: str) -> tuple[int, ...]:
    """ "0,1,2" as numbers."""
    return tuple(int(number) for number in text.split(","))


def pack(args: argparse.Namespace) -> None:
    """The record of all runs in WORK as one file; `compare` may have added to their folders."""
    for folder in sorted(path for path in args.work.iterdir() if path.is_dir()):
        copy_kept(folder, args.out / folder.name)
    with tarfile.open(args.archive, "w:xz") as archive:
        archive.add(args.out, arcname=args.out.name)


def copy_kept(source: Path, target: Path) -> None:
    """What of a run is small."""
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)


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
            start_new_session=True,
        )


def keep(run: Run, args: argparse.Namespace, code: int, seconds: float) -> None:
    """Copy what is small to the record, and say how the run ended."""
    source, target = args.work / run.name, args.out / run.name
    copy_kept(source, target)
    facts = {"name": run.name, "gpus": run.gpus, "seconds": round(seconds, 1), "exit_code": code}
    facts["command"] = " ".join(run.command(args.data, args.work)[1:])
    (target / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
    tail = (source / "log.txt").read_text(errors="replace").strip().splitlines()[-3:]
    print(f"{run.name}: exit {code} after {seconds:.0f} s\n  " + "\n  ".join(tail), flush=True)


if __name__ == "__main__":
    raise SystemExit(guarded(main))
