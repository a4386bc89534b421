"""The steps.csv of a run: a record for each iteration. Needs no torch and no Megatron."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from megatron_magi.compare.run_error import RunError


@dataclass(frozen=True)
class StepRecord:
    """One iteration; the columns of the CSV."""

    iteration: int
    """Counted from 1 over all starts of the run."""
    lm_loss: float
    """Mean loss over all counted tokens of the global batch, nats."""
    grad_norm: float
    """Norm of all gradients, before clipping."""
    learning_rate: float
    """Used in this iteration."""
    loss_tokens: int
    """Tokens whose loss counts."""
    consumed_samples: int
    """Samples since the run began, with this iteration."""
    step_seconds: float
    """Wall time of the iteration, without a validation after it."""
    tokens_per_second: float
    """Rate of the whole world, for all tokens of the batch."""
    tflops_per_rank: float
    """Rate of a rank, counting visible cells only; see `estimate/flops.py`."""
    mfu: float | None
    """Share of the GPU's dense bf16 rate; None (empty) for a GPU without a known one."""
    memory_gib: float
    """Highest peak of any rank: CUDA allocator, or resident memory on a CPU."""
    cp_imbalance: float
    """The largest load of a context-parallel rank over the mean, averaged over microbatches."""
    num_processes: int | None = None
    """Number of ranks that trained it, over all parallel axes."""
    validation_loss: float | None = None
    """Mean loss of the held-out samples after this iteration, nats. None (empty): not measured."""


STEPS = "steps.csv"


def read_steps(path: Path) -> list[dict[str, str]]:
    """Lines of a steps.csv; none if there is no such file.

    Raises:
        RunError: the file is not text, or cannot be split into columns.
    """
    if not path.is_file():
        return []
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise RunError(
            f"a steps.csv must be text with a line for each iteration, got {error} in {path}; "
            f"restore or remove it"
        ) from error
