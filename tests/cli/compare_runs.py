"""Runs that `compare` reads: curves of steps, recipes and dumped gradients, written by hand."""

import csv
import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron_magi.compare.gradient_folder import finish, gradient_path, write_gradient
from megatron_magi.compare.steps_file import StepRecord
from megatron_magi.training.process.whole_files import partial_folder
from tests.cli.command import Capture, run

STEPS = 120
VOCABULARY = 384  # 257 tokens, padded to a multiple of 128
CURVE = 1.0 + (math.log(VOCABULARY) - 1.0) * np.exp(-np.arange(STEPS) / 20)
"""Starts at ln(vocabulary) and falls by 4.94 nats."""
NOISE = 1e-4 * np.random.default_rng(0).normal(size=STEPS)
ODD = NOISE[::-1].copy()
"""Differences of the noise's size in another order, and at step 1 none."""
ODD[0] = 0.0
SIGNS = np.where(np.arange(STEPS) % 2, 1.0, -1.0)
ONE_STEP = 2.0**-8
"""Noise of a bf16 gradient is at least this."""
PARAMETERS = ("embedding.weight", "decoder.layers.0.weight", "decoder.layers.10.weight")
Write = Callable[..., Path]
"""`write_beside_curve` in the test's own folder."""


def write_steps(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    with (folder / "steps.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, [f.name for f in fields(StepRecord)])
        lines.writeheader()
        lines.writerows(dict.fromkeys(lines.fieldnames, 0) | {"validation_loss": ""} | row
                        for row in rows)  # fmt: skip


def write_run(
    folder: Path, noise: float, steps: int = 12, speed: float = 1000.0, **more: Any
) -> str:
    write_steps(folder, [
        {"iteration": i, "lm_loss": (2 + math.exp(-i)) * (1 + noise * i),
         "grad_norm": (1 + 1 / i) * (1 + noise), "step_seconds": 1.0,
         "tokens_per_second": speed * (0.1 if i == 1 else 1)} | more
        for i in range(1, steps + 1)
    ])  # fmt: skip
    return str(folder)


def write_beside_curve(
    parent: Path,
    name: str,
    difference: Any = 0.0,
    gradients: dict[str, float] | float | None = None,
    steps: int = STEPS,
    validation: Any = 0.0,
    **recipe: str,
) -> Path:
    """Writes a run of `STEPS` steps beside the curve; relative differences and gradient errors."""
    folder = parent / name
    loss = CURVE * (1 + np.broadcast_to(difference, STEPS))
    validated = CURVE + np.broadcast_to(validation, STEPS)
    write_steps(folder, [
        {"iteration": i + 1, "lm_loss": loss[i], "grad_norm": 1.0, "tokens_per_second": 1000.0,
         "num_processes": 2, "loss_tokens": 4096,
         "validation_loss": validated[i] if (i + 1) % 40 == 0 else ""}
        for i in range(steps)
    ])  # fmt: skip
    facts = {
        "vocab_size": "257", "vocab_multiple": "128", "hidden_size": "16", "dtype": "bf16"
    } | recipe  # fmt: skip
    model = ", ".join(f"{name}: {value}" for name, value in facts.items() if name != "dtype")
    (folder / "recipe.yaml").write_text(f"model: {{{model}}}\ntrain: {{dtype: {facts['dtype']}}}\n")
    if gradients is not None:
        dump(folder, gradients)
    return folder


def dump(folder: Path, errors: dict[str, float] | float, iteration: int = 1) -> None:
    """Gradients of ones, with these relative L2 errors."""
    partial = partial_folder(gradient_path(folder, iteration))
    norms: dict[str, Any] = {}
    for name in PARAMETERS:
        error = errors.get(name, 0.0) if isinstance(errors, dict) else errors
        gradient = np.ones((4, 8), np.float32)
        gradient[::2] *= 1 + error
        gradient[1::2] *= 1 - error
        norms[name] = (gradient.shape, write_gradient(partial, name, gradient))
    finish(partial, norms)


def judge(
    capsys: Capture, family: tuple[str, str], run_folder: Path, *options: str
) -> tuple[int, dict[str, Any]]:
    """Exit code, and the JSON with the run's gates by name under "gates"."""
    drop = () if "--loss-drop" in options else ("--loss-drop", "4.9")
    arguments = ["compare", family[0], str(run_folder), "--noise", family[1], *drop, *options]
    code, out, err = run(capsys, *arguments, "--json", "--no-figure")
    assert code in (0, 1), err
    facts = json.loads(out)
    facts["gates"] = {g["name"]: g for g in facts["runs"][0]["gates"]}
    return code, facts


def failed(facts: dict[str, Any]) -> list[str]:
    return [name for name, g in facts["gates"].items() if g["passed"] is False]
