"""The record of a completed iteration."""

from __future__ import annotations

from dataclasses import dataclass


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
