"""What is known of one iteration when it is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """One iteration; the columns of the CSV."""

    iteration: int
    """Counted from 1 over all starts of the run."""
    lm_loss: float
    """Mean over all counted tokens of the global batch, nats."""
    grad_norm: float
    """Global, before clipping."""
    learning_rate: float
    """Used in this iteration."""
    loss_tokens: int
    """Tokens whose loss counts."""
    consumed_samples: int
    """Since the run began, this iteration included."""
    step_seconds: float
    """Wall time of the iteration; a validation behind it does not count."""
    tokens_per_second: float
    """Of the whole world, all tokens of the batch."""
    tflops_per_rank: float
    """Visible cells only; see `estimate/flops.py`."""
    mfu: float | None
    """Share of the GPU's dense bf16 rate; None (empty) for a GPU without a known one."""
    memory_gib: float
    """Highest peak of a rank: CUDA allocator, or resident memory on a CPU."""
    cp_imbalance: float
    """Largest over mean attention load of the context-parallel ranks, mean over microbatches."""
    num_processes: int | None = None
    """That trained it, of all axes together."""
    validation_loss: float | None = None
    """Mean over the held-out samples after this iteration, nats. None (empty): not measured."""
