"""Gradients of runs in bf16 beside those in fp32: errors of each parameter, and shares of controls.

    python -m benchmarks.train.gradient_shares --truth RUNS/fp32 --stock RUNS/cudnn \\
        --also RUNS/fa3 --run RUNS/magi_cp1 --run RUNS/magi_cp4 \\
        --control RUNS/late=RUNS/fp32_late --csv gradients.csv

Every folder is one of Megatron's --save with the wgrads of one step (--save-wgrads-interval 1), all
from the same weights and samples. A control is a run with one error, and the fp32 run with that
error. Exit code 0: every gate holds. The gates are fixed in docs/results/llama3_protocol.md:

- error: |run - truth| over stock's, in the median of parameters at most 1.05, at worst 1.25;
- share: how much of an error a run has, the projection of (run - truth) on (fp32 with the error -
  truth), each parameter over its norm: within 0.25 of stock's for a run, above 0.5 for the control.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser, UsageError
from megatron_magi.compare.run_error import RunError
from megatron_magi.compare.wgrads import (
    joined,
    read_wgrads,
    saved_iterations,
    without_tied_output,
)

MEDIAN, WORST = 1.05, 1.25
SHARE_OF_A_RUN, SHARE_OF_A_CONTROL = 0.25, 0.5
EQUAL = 1e-6
"""A control this close to the truth with its error and without it has none."""
RENAMED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""TransformerEngine's names for parameters of Megatron's local layers."""

Gradients = dict[str, Tensor]
"""In fp32 on the CPU, whose threads torch uses; a 1B model's are 5 GB."""


@dataclass
class Judged:
    """A run, a second stock kernel or a control."""

    folder: Path
    errors: dict[str, float] = field(default_factory=dict)
    """Relative L2 error of each parameter's gradient."""
    shares: dict[str, float] = field(default_factory=dict)
    """By control."""

    @property
    def name(self) -> str:
        return self.folder.name

    def ratios(self, stock: Judged) -> np.ndarray:
        """Errors over stock's, of every parameter."""
        return np.array([self.errors[name] / stock.errors[name] for name in stock.errors])


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--truth", type=Path, required=True, help="in fp32")
    parser.add_argument("--stock", type=Path, required=True, help="whose errors are the yardstick")
    parser.add_argument(
        "--also", type=Path, action="append", default=[], help="printed, not judged"
    )
    parser.add_argument("--run", type=Path, action="append", default=[], help="judged")
    parser.add_argument(
        "--control", type=control, action="append", default=[], metavar="RUN=TRUTH",
        help="a run and an fp32 run with the same error",
    )  # fmt: skip
    parser.add_argument("--csv", type=Path, help="write the errors of each parameter and run")
    options = parser.parse_args()
    try:
        comparison = Comparison(options.truth, options.stock, dict(options.control))
        stock, *others = (
            comparison.judged(folder)
            for folder in (options.stock, *options.also, *options.run, *dict(options.control))
        )
    except RunError as error:
        raise UsageError(str(error)) from error
    if options.csv:
        write_csv(options.csv, [stock, *others])
    judged = {*options.run}
    lines, holds = report(stock, others, judged, [run.name for run, _ in options.control])
    print("\n".join(lines))
    return 0 if holds else 1


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

    def __init__(self, truth: Path, stock: Path, controls: dict[Path, Path]) -> None:
        self.truth = read(truth)
        self.norms = {name: float(vector_norm(g)) for name, g in self.truth.items()}
        self.known = {run.name: self._known_error(folder) for run, folder in controls.items()}

    def judged(self, folder: Path) -> Judged:
        """Errors and shares of one run."""
        run, found = read(folder), Judged(folder)
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


def report(
    stock: Judged, others: Sequence[Judged], judged: set[Path], controls: Sequence[str]
) -> tuple[list[str], bool]:
    """(a Markdown table, whether every gate holds)."""
    heads = [f"share of {name}" for name in controls]
    lines = [
        f"| run | error / stock's, median | worst | {' | '.join([*heads, 'verdict'])} |",
        f"|{'---|' * (4 + len(heads))}",
    ]
    holds = True
    for each in (stock, *others):
        verdict, holds_here = _verdict(each, stock, each.folder in judged)
        holds = holds and holds_here
        ratios = each.ratios(stock)
        shares = [f"{each.shares[name]:+.2f}" for name in controls]
        cells = [each.name, f"{np.median(ratios):.3f}", f"{ratios.max():.3f}", *shares, verdict]
        lines.append(f"| {' | '.join(cells)} |")
    errors = np.array(list(stock.errors.values()))
    lines.append(f"stock's error: median {np.median(errors):.3%}, worst {errors.max():.3%}")
    return lines, holds


def _verdict(each: Judged, stock: Judged, is_run: bool) -> tuple[str, bool]:
    if each.name in each.shares:
        caught = each.shares[each.name] > SHARE_OF_A_CONTROL
        return ("caught" if caught else "NOT CAUGHT"), caught
    if not is_run:
        return "stock", True
    return ("FAIL " + ", ".join(failed), False) if (failed := [*_failures(each, stock)]) else (
        "PASS", True)  # fmt: skip


def _failures(each: Judged, stock: Judged) -> Iterator[str]:
    ratios = each.ratios(stock)
    if not np.median(ratios) <= MEDIAN:
        yield "median"
    if not ratios.max() <= WORST:
        yield "worst"
    for name, share in each.shares.items():
        if not abs(share - stock.shares[name]) <= SHARE_OF_A_RUN:
            yield f"share of {name}"


def write_csv(path: Path, runs: Sequence[Judged]) -> None:
    """A line for each parameter and run."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["run", "parameter", "relative_error"])
        for run in runs:
            rows.writerows([run.name, name, f"{e:.6g}"] for name, e in run.errors.items())


if __name__ == "__main__":
    raise SystemExit(guarded(main))
