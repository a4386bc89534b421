"""Runs as Megatron logs them with --tensorboard-dir, without training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

ARGUMENTS = {
    "seq_length": 128,
    "world_size": 2,
    "padded_vocab_size": 384,
    "hidden_size": 16,
    "init_method_std": 0.02,
    "bf16": True,
    "fp16": False,
    "train_iters": 12,
}
TAGS = {"loss": "lm loss", "norm": "grad-norm", "validation": "lm loss validation"}


def write_events(
    folder: Path,
    losses: Mapping[int, float],
    norms: Mapping[int, float] | None = None,
    validation: Mapping[int, float] | None = None,
    arguments: Mapping[str, object] = ARGUMENTS,
    tags: Mapping[str, str] = TAGS,
    began: float = 0.0,
) -> Path:
    """One start of a job, ``began`` seconds after the first; a step takes two seconds."""
    writer = SummaryWriter(str(folder))
    for name, value in arguments.items():
        writer.add_text(name, str(value), global_step=0)
    for step, loss in losses.items():
        writer.add_scalar("batch-size", 4, step, walltime=began + 2.0 * step)
        writer.add_scalar(tags["loss"], loss, step, walltime=began + 2.0 * step)
        writer.add_scalar(f"{tags['loss']} vs samples", loss, 4 * step)
        norm = 1.0 if norms is None else norms.get(step)
        if norm is not None:
            writer.add_scalar(tags["norm"], norm, step, walltime=began + 2.0 * step)
        if step in (validation or {}):
            writer.add_scalar(tags["validation"], validation[step], step)
    writer.close()
    return folder
