"""Runs that `compare` reads: curves of steps, facts of models and gradients, written by hand."""

import csv
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_magi.compare.model_facts import ModelFacts
from tests.cli.command import Capture, run
from tests.compare.saved_gradients import save_gradients

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
COLUMNS = (
    *("iteration", "lm_loss", "grad_norm", "step_seconds", "tokens_per_second", "loss_tokens"),
    *("num_processes", "validation_loss"),
)
Write = Callable[..., Path]
"""`write_beside_curve` in the test's own folder."""


def write_steps(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    with (folder / "steps.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, COLUMNS)
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
    dtype: str = "bf16",
    vocab_size: int = VOCABULARY,
    hidden_size: int = 16,
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
    facts = ModelFacts(dtype, vocab_size, hidden_size * 0.02**2)
    (folder / "model.json").write_text(json.dumps(asdict(facts)))
    if gradients is not None:
        dump(folder, gradients)
    return folder


def dump(folder: Path, errors: dict[str, float] | float, iteration: int = 1) -> None:
    """Gradients of ones, with these relative L2 errors."""
    gradients = {}
    for name in PARAMETERS:
        error = errors.get(name, 0.0) if isinstance(errors, dict) else errors
        gradients[name] = torch.ones(4, 8)
        gradients[name][::2] *= 1 + error
        gradients[name][1::2] *= 1 - error
    save_gradients(folder, iteration, gradients)


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
