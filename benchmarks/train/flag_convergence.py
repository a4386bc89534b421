"""The runs of docs/results/convergence_protocol.md, on two or more GPUs of one host.

    python -m benchmarks.train.flag_convergence --megatron CHECKOUT --data FOLDER --out OUT \
        --work WORK te_p2p gradients magi
    python -m benchmarks.train.flag_convergence --gpus 0,1,2,3 --at-once 8 ... paired
    python -m benchmarks.train.flag_convergence --list

Names of runs, and `gradients`, `controls`, `fp8`, `documents`, `paired` and `recall`, each for
several. A run takes one GPU or two, those that have the fewest runs when it begins.
`te_p2p` leaves the checkpoint in WORK that `gradients` begins at, and so must come before it on the
same machine. What of a run is small goes to OUT/NAME, which `megatron-magi compare` reads, and of
paired runs paired.py; gradients are compared here, because they have gigabytes. FOLDER has
train.bin, train.idx, valid.bin and valid.idx (code_corpus.py).
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.lib.options import at_least
from benchmarks.lib.record import describe
from benchmarks.train import flag_cases
from benchmarks.train.convergence import gpu_numbers
from benchmarks.train.flag_cases import Run
from benchmarks.train.flag_rank import ENDS, ERROR, FOLDER
from benchmarks.train.pretrain import environment, first_error, words
from benchmarks.train.recall_cases import recall_runs
from benchmarks.train.recall_counts import COUNTS
from benchmarks.train.warm_ranks import Job, WarmRanks
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser, UsageError, positive
from megatron_magi.compare.gradient_errors import Baseline, gradient_errors
from megatron_magi.compare.positions import POSITIONS, read_positions
from megatron_magi.compare.steps_file import STEPS, StepRecord

SCRIPT = "pretrain_gpt.py"
CORPUS = ("train.bin", "train.idx", "valid.bin", "valid.idx")
WARM = 4
"""Processes that wait for the next runs."""
GROUPS = ("gradients", "controls", "fp8", "documents", "paired", "recall")
"""What stands for several runs."""
SERIES = {
    "lm_loss": "lm loss",
    "grad_norm": "grad norm",
    "learning_rate": "learning rate",
    "step_seconds": "elapsed time per iteration (ms)",
}
"""Columns of steps.csv, and what Megatron's log calls them."""


def main() -> int:
    options = parse()
    chosen = runs_of(options.runs, options.work)
    if options.list:
        print("\n".join(run.name for run in chosen))
        return 0
    check_places(options, chosen)
    with Session(options) as session:
        one_step = [run for run in chosen if run.gradients_of]
        ended_well = session.make([run for run in chosen if not run.gradients_of])
        ended_well = ended_well and session.make(one_step)
    if one_step:
        compare_gradients(options.out)
    return 0 if ended_well else 1


def parse() -> argparse.Namespace:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", help=f"names, {', '.join(GROUPS)}; default: all")
    parser.add_argument("--megatron", type=Path, help="a Megatron-LM checkout")
    parser.add_argument("--data", type=Path, help="the folder of the corpus")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence_flag"))
    parser.add_argument("--work", type=Path, default=Path("runs/convergence_flag_work"))
    parser.add_argument("--limit-s", type=positive, default=1e9, help="start no run after it")
    parser.add_argument("--run-limit-s", type=positive, default=550, help="stop a run after it")
    parser.add_argument(
        "--at-once", type=at_least(1), default=1, help="runs that share the GPUs: no step times"
    )
    parser.add_argument("--gpus", type=gpu_numbers, default=(0, 1), help="numbers, default 0,1")
    parser.add_argument("--commit")
    parser.add_argument("--list", action="store_true", help="show the runs and stop")
    options = parser.parse_args()
    if len(options.gpus) < 2:
        parser.error("--gpus must name two GPUs or more, which most runs need, got one")
    if not options.list and (options.megatron is None or options.data is None):
        parser.error("--megatron and --data are needed, got not both; or pass --list")
    unknown = set(options.runs) - {*GROUPS}
    unknown -= {run.name for run in runs_of([], options.work)}
    if unknown:
        parser.error(f"runs must be named as --list shows them, got {', '.join(sorted(unknown))}")
    return options


def runs_of(names: Sequence[str], work: Path) -> list[Run]:
    """The runs of these names in the protocol's order; of no names all."""
    first, *others = flag_cases.long_runs()
    groups = {
        "": [flag_cases.checkpointed(first, work), *others],
        "gradients": flag_cases.gradient_runs(work),
        "controls": flag_cases.controls(),
        "fp8": flag_cases.fp8_runs(),
        "documents": flag_cases.document_runs(),
        "paired": flag_cases.paired_runs(),
        "recall": recall_runs(),
    }
    return [
        run
        for group, runs in groups.items()
        for run in runs
        if not names or run.name in names or group in names
    ]


def check_places(options: argparse.Namespace, runs: Sequence[Run]) -> None:
    """Before a process is started: Megatron's script, and the corpus of every run.

    Raises:
        UsageError: one of them is not there.
    """
    corpora = sorted({options.data / run.corpus for run in runs})
    files = [options.megatron / SCRIPT, *(corpus / name for corpus in corpora for name in CORPUS)]
    lost = [str(path) for path in files if not path.is_file()]
    if lost:
        raise UsageError(
            f"--megatron must be a checkout with {SCRIPT}, and --data a folder with "
            f"{', '.join(CORPUS)} for these runs, got no {', '.join(lost)}; name others, or make "
            f"the corpus (code_corpus.py, recall_corpus.py)"
        )


class Gpus:
    """The GPUs of the host, which several runs may share."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """
        Args:
            numbers: those that runs may take.
        """
        self._runs = dict.fromkeys(numbers, 0)
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, count: int) -> Iterator[str]:
        """As many as that with the fewest runs, as CUDA_VISIBLE_DEVICES names them."""
        with self._lock:
            mine = sorted(self._runs, key=lambda number: self._runs[number])[:count]
            self._count(mine, 1)
        try:
            yield ",".join(str(number) for number in mine)
        finally:
            with self._lock:
                self._count(mine, -1)

    def _count(self, numbers: list[int], runs: int) -> None:
        for number in numbers:
            self._runs[number] += runs


class Session:
    """Makes runs, some of them at a time; use it as a context manager."""

    def __init__(self, options: argparse.Namespace) -> None:
        """
        Args:
            options: of the command line.
        """
        self.options = options
        self._meta = describe("python -m benchmarks.train.flag_convergence", options.commit)
        self._deadline = time.monotonic() + options.limit_s
        self._gpus = Gpus(options.gpus)
        variables = environment(options.megatron)
        # Times of runs that share the GPUs mean nothing, so others may import beside them.
        self._pool = WarmRanks(options.megatron, variables, WARM, quiet=options.at_once == 1)

    def __enter__(self) -> Session:
        self._pool.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.__exit__(*error)

    def make(self, runs: Sequence[Run]) -> bool:
        """Make them in this order; whether all that were begun ended well."""
        with ThreadPoolExecutor(self.options.at_once) as threads:
            return all(list(threads.map(self._make_one, runs)))

    def _make_one(self, run: Run) -> bool:
        if time.monotonic() > self._deadline:
            print("time is up, left out:", run.name, flush=True)
            return True
        folder = self.options.out / (run.gradients_of or run.name)
        folder.mkdir(parents=True, exist_ok=True)
        if not run.gradients_of:  # or losses of an earlier run would be taken for this one's
            for name in (POSITIONS, COUNTS):
                (folder / name).unlink(missing_ok=True)
        job = job_of(run, folder, self.options)
        began = time.monotonic()
        with self._gpus.lent(run.gpus) as gpus:
            job.environment["CUDA_VISIBLE_DEVICES"] = gpus
            outcome = self._pool.run(job, self.options.run_limit_s)
        facts = {"name": run.name, "seconds": round(time.monotonic() - began, 1)}
        said = "gradients"
        if not run.gradients_of:
            facts |= {"failed": outcome.failed, "command": job.arguments, "error": run.error}
            facts |= {"environment": run.environment, "gpus": gpus, "meta": self._meta}
            facts |= {"at_once": self.options.at_once, "lines": our_lines(outcome.output)}
            (folder / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
            said = write_curves(folder, run, outcome.output)
        elif not outcome.failed:
            keep_gradients(folder, self.options.work / run.name)
        if outcome.failed:
            said = f"failed\n{first_error(outcome.output)}"
        print(f"{run.name} ({facts['seconds']} s): {said}", flush=True)
        return not outcome.failed


def our_lines(output: str) -> list[str]:
    """What our package printed."""
    return [line for line in output.splitlines() if line.startswith("megatron_magi")]


def job_of(run: Run, folder: Path, options: argparse.Namespace) -> Job:
    """The run as processes are told it; held-out losses are written to the folder."""
    variables = {**run.environment, **({ERROR: run.error} if run.error else {})}
    if run.validates:
        variables |= {FOLDER: str(folder.resolve()), ENDS: " ".join(map(str, flag_cases.BUCKETS))}
    flags = words({**run.flags, **data_flags(options.data / run.corpus, run.name)})
    script = str(options.megatron / SCRIPT)
    return Job(run.gpus, "benchmarks.train.flag_rank", [script, *flags], variables)


def data_flags(folder: Path, name: str) -> dict[str, Any]:
    """Where the samples come from, and where a run of this name keeps its index of them, which two
    runs that begin together must not write to one place."""
    return {
        "train-data-path": str(folder / "train"),
        "valid-data-path": str(folder / "valid"),
        "test-data-path": str(folder / "valid"),
        "data-cache-path": str(folder / "cache" / name),
    }


def write_curves(folder: Path, run: Run, log: str) -> str:
    """Write steps.csv from Megatron's log, and the recipe.yaml that gates need; a summary."""
    series = {
        column: [float(x) for x in re.findall(rf" {re.escape(name)}: +([-+.\deEnaif]+)", log)]
        for column, name in SERIES.items()
    }
    tokens = int(run.flags["seq-length"]) * int(run.flags["global-batch-size"])
    validated = validation_losses(folder)
    rows = []
    for i, values in enumerate(zip(*series.values(), strict=True), 1):
        row: dict[str, Any] = dict(zip(series, values, strict=True))
        row["step_seconds"] /= 1e3
        row |= {"iteration": i, "loss_tokens": tokens, "num_processes": run.gpus}
        row["tokens_per_second"] = tokens / row["step_seconds"]
        row["consumed_samples"] = i * int(run.flags["global-batch-size"])
        rows.append(row | {"validation_loss": validated.get(i, "")})
    with (folder / STEPS).open("w", newline="") as file:
        lines = csv.DictWriter(file, [field.name for field in fields(StepRecord)], restval="")
        lines.writeheader()
        lines.writerows(rows)
    (folder / "recipe.yaml").write_text(recipe(run))
    last = f"{rows[-1]['lm_loss']:.5f}" if rows else "none"
    return f"{len(rows)} steps, last loss {last}, validation {validated}"


def validation_losses(folder: Path) -> dict[int, float]:
    """Mean held-out loss by iteration: every sample has a token at every position."""
    by_bucket = read_positions(folder)
    sums: dict[int, float] = {}
    tokens: dict[int, int] = {}
    for bucket, loss in by_bucket.items():
        size = bucket.end - bucket.first
        sums[bucket.iteration] = sums.get(bucket.iteration, 0.0) + size * loss
        tokens[bucket.iteration] = tokens.get(bucket.iteration, 0) + size
    return {iteration: sums[iteration] / tokens[iteration] for iteration in sums}


def recipe(run: Run) -> str:
    """What `compare` reads of a run's model."""
    model = {
        "vocab_size": run.flags["vocab-size"] + 1,
        "vocab_multiple": run.flags["make-vocab-size-divisible-by"],
        "hidden_size": run.flags["hidden-size"],
    }
    shown = ", ".join(f"{name}: {value}" for name, value in model.items())
    return f"model: {{{shown}}}\ntrain: {{dtype: bf16}}\n"


def keep_gradients(folder: Path, saved: Path) -> None:
    """Move the gradients that Megatron saved to the run's folder, and delete what else it saved."""
    shutil.rmtree(folder / "wgrads", ignore_errors=True)
    shutil.move(saved / "wgrads", folder / "wgrads")
    shutil.rmtree(saved)


def compare_gradients(out: Path) -> None:
    """Write every run's gradient_errors.csv, beside the mean of the stock runs, and delete the
    gradients; a deterministic run of ours is measured beside the deterministic stock run."""
    dumped = {folder.parent for folder in out.glob("*/wgrads")}
    stock = Baseline(tuple(sorted(run for run in dumped if run.name.startswith("te_"))))
    alone = out / flag_cases.DETERMINISTIC_STOCK
    for run in sorted(dumped - {alone}):
        beside = Baseline((alone,)) if run.name == flag_cases.DETERMINISTIC_OURS else stock
        gradient_errors(run, stock.without(run) if run in stock.runs else beside)
    for run in dumped:
        shutil.rmtree(run / "wgrads")


if __name__ == "__main__":
    raise SystemExit(guarded(main))
