"""Gradients of runs in bf16 compared with fp32: errors of each parameter, and shares of controls.

    python -m benchmarks.train.gradient_shares --truth RUNS/fp32 --stock RUNS/cudnn \\
        --also RUNS/fa3 --run RUNS/magi_cp1 --run RUNS/magi_cp4 \\
        --control RUNS/late=RUNS/fp32_late --weights drawn --record gradients.json
    python -m benchmarks.train.gradient_shares --from gradients.json      the same tables again

Every folder is one of Megatron's --save with the wgrads of one step (--save-wgrads-interval 1), all
from the same weights and samples. A control is a run with one error, and the fp32 run with that
error. Exit code 0: every gate holds (gradient_gates.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from benchmarks.lib.record import describe, write_record
from benchmarks.train.gradient_gates import Judged, Kind, Row, comparisons, report, rows
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser, UsageError
from megatron_magi.compare.run_error import RunError
from megatron_magi.compare.wgrads import (
    joined,
    read_wgrads,
    saved_iterations,
    without_tied_output,
)

EQUAL = 1e-6
"""A control this close to the truth with its error and without it has none."""
RENAMED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""TransformerEngine's names for parameters of Megatron's local layers."""

Gradients = dict[str, Tensor]
"""In fp32 on the CPU, whose threads torch uses; a 1B model's are 5 GB."""


def main() -> int:
    options = parse()
    if options.read is None:
        return judge(options)
    holding = []
    for (weights, baseline), runs in comparisons(options.read).items():
        lines, holds = report(runs)
        print("\n".join([f"Weights: {weights}; compared with {baseline}", *lines, ""]))
        holding.append(holds)
    return 0 if all(holding) else 1


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", type=Path, dest="read", metavar="RECORD", help="print its tables")
    parser.add_argument("--truth", type=Path, help="in fp32")
    parser.add_argument("--stock", type=Path, help="whose errors are the yardstick")
    parser.add_argument("--also", type=Path, action="append", default=[], help="not judged")
    parser.add_argument("--run", type=Path, action="append", default=[], help="judged")
    parser.add_argument(
        "--control", type=control, action="append", default=[], metavar="RUN=TRUTH",
        help="a run and an fp32 run with the same error",
    )  # fmt: skip
    parser.add_argument("--weights", default="drawn", help="which they are, for the record")
    parser.add_argument("--record", type=Path, help="add to this file, or begin it")
    parser.add_argument("--commit", help="of the programs, where this is no checkout")
    options = parser.parse_args()
    if options.read is None and not (options.truth and options.stock):
        raise UsageError("--truth and --stock are required, got none; or read a record (--from)")
    return options


def judge(options: argparse.Namespace) -> int:
    controls = dict(options.control)
    kinds: list[tuple[Kind, Sequence[Path]]] = [
        ("stock", [options.stock, *options.also]), ("run", options.run), ("control", [*controls])
    ]  # fmt: skip
    try:
        comparison = Comparison(options.truth, controls)
        runs = [comparison.judged(folder, kind) for kind, folders in kinds for folder in folders]
    except RunError as error:
        raise UsageError(str(error)) from error
    lines, holds = report(runs)
    print("\n".join(lines))
    if options.record:
        add(options.record, rows(options.weights, runs), options.commit)
    return 0 if holds else 1


def add(path: Path, new: list[Row], commit: str | None) -> None:
    """Rows behind those of other weights and yardsticks."""
    command = " ".join(["python -m benchmarks.train.gradient_shares", *sys.argv[1:]])
    held: dict[str, Any] = {"meta": describe(command, commit), "rows": []}
    if path.is_file():
        held = json.loads(path.read_text())
    cell = new[0]["weights"], new[0]["beside"]
    others = [row for row in held["rows"] if (row["weights"], row["beside"]) != cell]
    write_record(path, held["meta"], [*others, *new])


def control(text: str) -> tuple[Path, Path]:
    run, _, truth = text.partition("=")
    if not truth:
        raise UsageError(f"--control must be RUN=TRUTH, got {text!r}; name both folders")
    return Path(run), Path(truth)


class Comparison:
    """The truth, and what it is with each control's error.

    Raises:
        RunError: a folder without gradients, with others, or a control without an error.
    """

    def __init__(self, truth: Path, controls: dict[Path, Path]) -> None:
        self.truth = read(truth)
        self.norms = {name: float(vector_norm(g)) for name, g in self.truth.items()}
        self.known = {run.name: self._known_error(folder) for run, folder in controls.items()}

    def judged(self, folder: Path, kind: Kind) -> Judged:
        """Errors and shares of one run."""
        run, found = read(folder), Judged(folder.name, kind)
        self._require_names(folder, run)
        for name, truth in self.truth.items():
            run[name] = (run[name] - truth) / self.norms[name]
            found.errors[name] = float(vector_norm(run[name]))
        found.shares = {control: _share(run, error) for control, error in self.known.items()}
        return found

    def _known_error(self, folder: Path) -> Gradients:
        """What a control's error adds to the truth, each parameter over its norm."""
        wrong = read(folder)
        self._require_names(folder, wrong)
        for name, truth in self.truth.items():
            wrong[name] = (wrong[name] - truth) / self.norms[name]
        size = max(float(vector_norm(error)) for error in wrong.values())
        if size < EQUAL:
            raise RunError(
                f"a control must have an error, got {folder} with the truth's gradients to "
                f"{size:.0e}; break what its samples reach"
            )
        return wrong

    def _require_names(self, folder: Path, found: Gradients) -> None:
        shapes = ({n: g.shape for n, g in each.items()} for each in (found, self.truth))
        if len({str(sorted(each.items())) for each in shapes}) > 1:
            odd = sorted({*found} ^ {*self.truth})[:4]
            raise RunError(
                f"{folder} must have the truth's parameters, got others: {odd}; train the same "
                f"model"
            )


def _share(difference: Gradients, error: Gradients) -> float:
    """How much of the error is in the difference: a projection."""
    above = sum(float(torch.sum(difference[name] * error[name])) for name in error)
    return above / sum(float(torch.sum(each * each)) for each in error.values())


def read(folder: Path) -> Gradients:
    """Whole gradients of the first saved step, by the names of Megatron's local layers.

    Raises:
        RunError: there are none.
    """
    steps = saved_iterations(folder)
    if not steps:
        raise RunError(
            f"{folder} must have the gradients of a step, got none; train it with --save and "
            f"--save-wgrads-interval 1"
        )
    pieces = without_tied_output(joined(read_wgrads(folder, steps[0])))
    return {_local_name(name): torch.from_numpy(parts[0]) for name, parts in pieces.items()}


def _local_name(name: str) -> str:
    for engine, local in RENAMED.items():
        name = name.replace(engine, local)
    return name


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
