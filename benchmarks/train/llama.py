"""Llama-3 1B through its recipe: saved weights, gradients of one step, and curves.

    python -m benchmarks.train.llama weights gradients --data PREFIX --out OUT --gpus 0,1,2,3 \\
        -- --tokenizer-type NullTokenizer

Each run is the packaged pretrain script with the recipe's flags, those of its case
(llama_cases.py), and what follows `--`. Runs take the GPUs that are free, in this order; those that
nobody times share one. All begin at the checkpoint of `weights` in OUT, or at --weights FOLDER. A
run that has ended well is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition

from benchmarks.lib.options import at_least
from benchmarks.train import early_start
from benchmarks.train.llama_cases import GROUPS, RECIPE, Case, base_flags
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser, UsageError

ENDED, LOG, GATE = "run.json", "log.txt", "gate"
SAVES_GRADIENTS = "--save-wgrads-interval"
CHECKPOINT = "latest_checkpointed_iteration.txt"
MOST_AT_ONCE = 12
"""Runs that begin together read the same files."""


def main() -> int:
    options = parse()
    chosen = [case for name in options.groups for case in GROUPS[name]() if wanted(case, options)]
    wide = [case.name for case in chosen if case.gpus > len(options.gpus)]
    if wide:
        raise UsageError(
            f"as many GPUs as the widest run needs are required, got {len(options.gpus)} for "
            f"{', '.join(wide)}; name more (--gpus), or other runs (--only)"
        )
    queue = Queue(options)
    for name in options.groups:  # the next one begins at what this one saves
        cases = [case for case in GROUPS[name]() if wanted(case, options)]
        code = queue.make(cases)
        if code:
            return code
    return 0


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "groups", nargs="+", choices=GROUPS, metavar="GROUP", help=", ".join(GROUPS)
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for each run")
    parser.add_argument("--data", default="mock", help="prefix of the packed text (default: mock)")
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--weights", type=Path, help="checkpoint that runs begin at")
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=["0"])
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="RUNS")
    parser.add_argument("--limit-s", type=at_least(1), default=1200, help="of a run")
    words, _, more = " ".join(sys.argv[1:]).partition(" -- ")
    options = parser.parse_args(words.split())
    options.more = more.split()
    return options


def wanted(case: Case, options: argparse.Namespace) -> bool:
    """Whether --only names it, or nothing."""
    return not options.only or case.name in options.only


ROUNDING = 1e-6
"""Of sums of parts."""


class Queue:
    """Makes runs in order, each on GPUs that no other run has."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._free, self._changed = dict.fromkeys(options.gpus, 1.0), Condition()

    def make(self, cases: list[Case]) -> int:
        """0 if all ended well."""
        most = 2 if all(map(self._needs_all, cases)) else MOST_AT_ONCE  # one trains, one imports
        with ThreadPoolExecutor(most) as threads:
            codes = list(threads.map(self._make, cases))
        return max(codes, default=0)

    def _make(self, case: Case) -> int:
        folder = self.options.out / case.name
        ended = folder / ENDED
        if ended.is_file() and json.loads(ended.read_text())["code"] == 0:
            return 0
        folder.mkdir(parents=True, exist_ok=True)
        early = self._start(case, folder, self.options.gpus) if self._needs_all(case) else None
        taken = self._take(case)
        began = time.monotonic()
        try:
            code = self._finish(early or self._start(case, folder, taken), folder)
        finally:
            self._give_back(case, taken)
            if SAVES_GRADIENTS in case.flags:
                _delete_checkpoint(folder / "save")
        facts = {"name": case.name, "code": code, "seconds": round(time.monotonic() - began, 1),
                 "flags": case.flags, "gpus": case.gpus}  # fmt: skip
        ended.write_text(json.dumps(facts, indent=1) + "\n")
        print(f"{case.name}: exit code {code}, {facts['seconds']} s", flush=True)
        return code

    def _needs_all(self, case: Case) -> bool:
        """True if its GPUs are known before they are free; it may import until then."""
        return case.part == 1 and case.gpus == len(self.options.gpus)

    def _start(self, case: Case, folder: Path, gpus: list[str]) -> subprocess.Popen[str]:
        """The processes of a run, which wait for its gate if they were started early."""
        begins = None if case.draws_weights else self._weights(case)
        name = case.recipe or self.options.recipe
        base = base_flags(name, self.options.data, self.options.more)
        words = case.words(base, folder, begins)
        module = "benchmarks.train.early_start" if self._needs_all(case) else case.launcher
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(case.gpus), "-m", module, "pretrain_gpt"]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        visible |= {early_start.GATE: str((folder / GATE).absolute()),
                    early_start.MODULE: case.launcher}  # fmt: skip
        (folder / GATE).unlink(missing_ok=True)
        with (folder / LOG).open("w") as log:
            return subprocess.Popen(
                [*launcher, *words], env={**os.environ, **visible, **case.environment},
                stdout=log, stderr=log, text=True,
            )  # fmt: skip

    def _finish(self, run: subprocess.Popen[str], folder: Path) -> int:
        (folder / GATE).touch()
        try:
            return run.wait(self.options.limit_s)
        except subprocess.TimeoutExpired:
            run.terminate()  # torchrun ends its processes
            run.wait()
            return 124

    def _weights(self, case: Case) -> Path:
        found: Path = self.options.weights or self.options.out / "weights" / "save"
        if not (found / CHECKPOINT).is_file():  # Megatron would draw weights
            raise UsageError(
                f"{case.name} begins at a checkpoint, got none in {found}; make the group weights "
                f"first, or name one (--weights)"
            )
        return found

    def _take(self, case: Case) -> list[str]:
        """The emptiest GPUs, once as many have room."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._with_room(case)) >= case.gpus)
            taken = self._with_room(case)[: case.gpus]
            for gpu in taken:
                self._free[gpu] -= case.part
            return taken

    def _with_room(self, case: Case) -> list[str]:
        """In order of the room."""
        fitting = [gpu for gpu, free in self._free.items() if free > case.part - ROUNDING]
        return sorted(fitting, key=lambda gpu: -self._free[gpu])

    def _give_back(self, case: Case, gpus: list[str]) -> None:
        with self._changed:
            for gpu in gpus:
                self._free[gpu] += case.part
            self._changed.notify_all()


def _delete_checkpoint(saved: Path) -> None:
    """Megatron ends every run that saves with one; at rate 0 it is the one that the run loaded."""
    for folder in saved.glob("iter_*"):
        shutil.rmtree(folder)


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
