"""TensorBoard event files of a run, where the tensorboard package is importable."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_magi.training.run.steps_file import StepRecord

TAGS = {
    "lm_loss": "lm loss",
    "validation_loss": "lm loss validation",
    "grad_norm": "grad-norm",
    "learning_rate": "learning-rate",
    "step_seconds": "iteration-time",
    "tokens_per_second": "magi/tokens per second",
    "tflops_per_rank": "magi/TFLOPs per rank",
    "memory_gib": "magi/peak memory GiB",
    "cp_imbalance": "magi/CP balance",
}
"""Columns of the CSV under Megatron's own tags, where it has one."""


class TensorBoard:
    """Scalars of every iteration; does nothing, after one line on stderr, without tensorboard."""

    def __init__(self, folder: Path, after_iteration: int) -> None:
        self.writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            print(
                "warning: log.tensorboard needs the tensorboard package, got none; no event files "
                "are written (pip install tensorboard)",
                file=sys.stderr,
                flush=True,
            )
            return
        # TensorBoard drops what an interrupted start wrote after its checkpoint.
        self.writer = SummaryWriter(str(folder), purge_step=after_iteration + 1)

    def step(self, record: StepRecord) -> None:
        """Write one iteration."""
        if self.writer is not None:
            for name, value in asdict(record).items():
                if name in TAGS and value is not None:
                    self.writer.add_scalar(TAGS[name], value, record.iteration)

    def close(self) -> None:
        """Flush to disk."""
        if self.writer is not None:
            self.writer.close()
