#!/usr/bin/env python3
"""The end of the quick start: a table, a verdict (the exit code) and two pictures.

    python scripts/quickstart_report.py runs/quickstart --recipe tiny_llama_cpu

Exit code 0: the right run passed and the wrong one was caught.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from quickstart_figures import draw_both, draw_losses, draw_shares, share_facts

from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from megatron_magi.compare.differences import Comparison, RunCurves, compare
from megatron_magi.compare.read_run import read_run
from megatron_magi.compare.run_error import RunError
from megatron_magi.training.process.processes import quiet_megatron
from megatron_magi.training.recipe.recipe import load_recipe
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig

NEXT = """\
next: torchrun -m megatron_magi.run pretrain_gpt.py <your flags> --attention-backend magi
      your own Megatron job (docs/megatron_lm.md); your own text and recipe: docs/quickstart.md"""
"""What a user does after a quick start that passed."""
BASELINE, RIGHT, WRONG = "dense", "magi", "moved_boundary"
WGRADS = "save/wgrads/iter_*/mp_rank_00.pth"
ALLOWED_GRADIENT = 1e-4
"""Relative, in fp32 after ten steps (2e-7 seen at the first step)."""


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help=f"folder of {BASELINE}, {RIGHT} and {WRONG}")
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--image", type=Path, help="also draw both pictures in one")
    parser.add_argument("--record", type=Path, help="also write what was seen as JSON")
    args = parser.parse_args()
    quiet_megatron()
    try:
        baseline, right, wrong = (read_run(args.runs / n) for n in (BASELINE, RIGHT, WRONG))
        comparisons = [compare(run, baseline) for run in (baseline, right, wrong)]
        config = load_recipe(args.recipe)
        gradients = [gradient_error(args.runs / n, args.runs / BASELINE) for n in (RIGHT, WRONG)]
    except (RecipeError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    trained = did_train(baseline)
    passed = trained and comparisons[1].passed and gradients[0].allowed
    caught = not comparisons[2].passed and not gradients[1].allowed
    print(table(comparisons, ("baseline", "PASS" if passed else "FAIL", _caught(caught))))
    print(
        f"gradients, largest error of a parameter: {RIGHT} {gradients[0]}; {WRONG} {gradients[1]}"
    )
    if not trained:
        print("FAIL: the baseline's loss did not fall, so equal losses prove nothing")
    written = [
        draw_losses(comparisons, args.runs / "loss.png"),
        draw_shares(config, args.runs / "mask.png"),
    ]
    if args.image:
        written.append(draw_both(comparisons, config, args.image))
    if args.record:
        written.append(write_record(comparisons, config, args.record))
    print("wrote " + ", ".join(str(path) for path in written))
    if passed and caught:
        print(NEXT)
    return 0 if passed and caught else 1


@dataclass(frozen=True)
class GradientError:
    """How far the gradients of one step are from the baseline's."""

    worst: float
    """Largest relative L2 error of a parameter's gradient."""
    parameters: int
    iteration: int

    @property
    def allowed(self) -> bool:
        return self.worst <= ALLOWED_GRADIENT

    def __str__(self) -> str:
        return (
            f"{self.worst:.1e} (step {self.iteration}, {self.parameters} parameters, allowed "
            f"{ALLOWED_GRADIENT:.0e})"
        )


def gradient_error(run: Path, baseline: Path) -> GradientError:
    """Compares what Megatron wrote by --save-wgrads-interval, at the first step of both.

    Raises:
        RecipeError: one of the folders has no gradients, or of other parameters.
    """
    steps = [{p.parent.name: p for p in folder.glob(WGRADS)} for folder in (run, baseline)]
    common = sorted(steps[0].keys() & steps[1].keys())
    if not common:
        raise RecipeError(
            f"gradients of one step are required, got none in both {run} and {baseline}; train "
            f"with --save FOLDER/save --save-wgrads-interval N"
        )
    got, wanted = (torch.load(each[common[0]], weights_only=True) for each in steps)
    errors = [
        float((got[chunk][name] - value).norm() / value.norm())
        for chunk, values in wanted.items()
        for name, value in values.items()
    ]
    return GradientError(max(errors), len(errors), int(common[0].removeprefix("iter_")))


def did_train(run: RunCurves, drop: float = 0.5) -> bool:
    """Whether the loss fell by `drop` nats or more; runs that learn nothing prove nothing."""
    return bool(run.loss[-5:].mean() < run.loss[0] - drop)


def table(comparisons: list[Comparison], verdicts: tuple[str, ...]) -> str:
    """Losses, gradient norms and differences of the runs, one line each."""
    gates = comparisons[0].gates
    head = (
        f"{'run':<16}{'loss, step 1':>14}{'last':>10}{'grad norm, 1':>14}{'last':>9}{'s/step':>8}"
        f"  |{'step 1':>9}{'any loss':>10}{'grad norm':>11}  | verdict"
    )
    over = f"{'':<71}  |{'differences to dense':>30}  |"
    lines = [over, head, "-" * len(head)]
    for c, verdict in zip(comparisons, verdicts, strict=True):
        run = c.run
        lines.append(
            f"{run.name:<16}{run.loss[0]:>14.6f}{run.loss[-1]:>10.5f}{run.grad_norm[0]:>14.6f}"
            f"{run.grad_norm[-1]:>9.5f}{statistics.median(run.step_seconds):>8.2f}"
            f"  |{c.first_step:>9.1e}{c.loss_difference.max():>10.1e}"
            f"{c.grad_norm_difference.max():>11.1e}  | {verdict}"
        )
    lines.append(
        f"{'allowed':<16}{'':<55}  |{gates.first_step:>9.1e}{gates.any_step_loss:>10.1e}"
        f"{gates.any_step_grad_norm:>11.1e}  |"
    )
    return "\n".join(lines)


def write_record(comparisons: list[Comparison], config: RunConfig, path: Path) -> Path:
    """Where and with what the runs were made, and every step of them."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    meta = {
        "command": "bash scripts/quickstart.sh",
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}, no GPU",
        "versions": {
            name: version(name) for name in ("torch", "megatron-core", "numpy", "megatron-magi")
        }
        | {"python": platform.python_version()},
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "recipe": config.name,
    }
    rows = [
        {
            "run": c.run.name,
            "iteration": i + 1,
            "lm_loss": c.run.loss[i],
            "grad_norm": c.run.grad_norm[i],
        }
        for c in comparisons
        for i in range(len(c.run.loss))
    ]
    text = ",\n  ".join(json.dumps(row) for row in rows)
    shares = json.dumps(share_facts(config))
    path.write_text(
        f'{{"meta": {json.dumps(meta)},\n "shares": {shares},\n "rows": [\n  {text}\n]}}\n'
    )
    return path


def _caught(caught: bool) -> str:
    return "caught" if caught else "NOT CAUGHT"


if __name__ == "__main__":
    raise SystemExit(guarded(main))
