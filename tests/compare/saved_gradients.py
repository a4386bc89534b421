"""Gradients of a run, saved as Megatron saves those of one rank."""

from collections.abc import Mapping
from pathlib import Path

import torch


def wgrads_path(run: Path, iteration: int) -> Path:
    return run / "wgrads" / f"iter_{iteration:07d}"


def save_gradients(run: Path, iteration: int, gradients: Mapping[str, torch.Tensor]) -> None:
    """Gradients by parameter, in reading order."""
    folder = wgrads_path(run, iteration)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"model_chunk0": dict(gradients)}, folder / "mp_rank_00.pth")
