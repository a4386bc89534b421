"""Whether a run that a signal stopped goes on with equal bits: losses, norms and weights.

    python -m tools.check_resume --record FILE.json RECIPE [section.key=value ...]

The recipe is trained three times with deterministic kernels: whole; until SIGTERM comes after
--stop-after steps, which ends it with a checkpoint; and on from there. Every loss and gradient norm
of the two halves must be that of the whole run, digit for digit, and every tensor of the last
checkpoints must hold equal bytes.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks.lib.record import describe
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser, UsageError
from megatron_magi.training.recipe.recipe import load_recipe

EQUAL = ("lm_loss", "grad_norm", "loss_tokens", "consumed_samples")
POLL_S = 0.05
LONGEST_S = 600.0


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--stop-after", type=int, default=8, help="steps before the signal")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--commit", help="for the record, where there is no git")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(args, Path(folder))
    print(json.dumps(found, indent=1))
    if args.record is not None:
        command = "python -m tools.check_resume " + " ".join(sys.argv[1:])
        record = {"meta": describe(command, args.commit), "rows": [found]}
        args.record.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if not found["unequal_steps"] and found["weights_equal"] else 1


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train it three times, and say what differs."""
    run = Training(args.recipe, args.overrides, folder)
    if run.start("whole").wait(LONGEST_S):
        raise UsageError("the recipe must train to its end, got a failure; its output is above")
    stopped = run.start("halves")
    _wait_for_steps(run.steps("halves"), args.stop_after, stopped)
    stopped.send_signal(signal.SIGTERM)
    code = stopped.wait(LONGEST_S)
    first = _rows(run.steps("halves"))
    if code or not args.stop_after <= len(first) < len(_rows(run.steps("whole"))):
        raise UsageError(f"the signal must end the run early with 0, got {code}: {len(first)}")
    run.start("halves", "checkpoint.load=latest").wait(LONGEST_S)
    whole, halves = _rows(run.steps("whole")), _rows(run.steps("halves"))
    unequal = [a["iteration"] for a, b in zip(whole, halves, strict=True) if not _same(a, b)]
    digests = [_digests(run.last_checkpoint(name)) for name in ("whole", "halves")]
    return {
        "recipe": args.recipe, "steps": len(whole), "stopped_after": len(first),
        "unequal_steps": unequal, "weights_equal": digests[0] == digests[1],
        "last_loss": whole[-1]["lm_loss"], "tensors": len(digests[0]),
        "sha256": hashlib.sha256(json.dumps(digests[0]).encode()).hexdigest(),
    }  # fmt: skip


class Training:
    """Runs of one recipe in one folder."""

    def __init__(self, recipe: str, overrides: list[str], folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self.overrides = [*overrides, "magi.deterministic=true", f"log.dir={folder}",
                          "log.progress=false", "validation.interval=null"]  # fmt: skip
        config = load_recipe(recipe, self.overrides)
        self.last = config.train.iterations
        self.overrides.append(f"checkpoint.interval={self.last}")

    def start(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        """Its output goes to ours, where a failure is seen."""
        words = [sys.executable, "-m", "megatron_magi", "train", self.recipe]
        return subprocess.Popen([*words, *self.overrides, f"name={name}", *more])

    def steps(self, name: str) -> Path:
        return self.folder / name / "steps.csv"

    def last_checkpoint(self, name: str) -> Path:
        return self.folder / name / "checkpoints" / f"iter_{self.last:07d}"


def _wait_for_steps(path: Path, number: int, process: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    while not path.is_file() or len(_rows(path)) < number:
        if process.poll() is not None or time.monotonic() - began > LONGEST_S:
            raise UsageError(f"{number} steps must be there before the signal, got {path}")
        time.sleep(POLL_S)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _same(a: dict[str, str], b: dict[str, str]) -> bool:
    return all(a[column] == b[column] for column in EQUAL)


def _digests(folder: Path) -> dict[str, str]:
    """sha256 of every tensor of a checkpoint: weights, main weights, moments."""
    whole = folder.with_name("whole.pt")
    dcp_to_torch_save(folder, whole)
    state = torch.load(whole, map_location="cpu", weights_only=False, mmap=True)
    found = {}
    for name, value in sorted(_tensors(state, "")):
        data = value.contiguous().flatten().view(torch.uint8).numpy()
        found[name] = hashlib.sha256(data.data).hexdigest()
    return found


def _tensors(state: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, dict | list | tuple):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in pairs:
            yield from _tensors(value, f"{name}.{key}" if name else str(key))


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
