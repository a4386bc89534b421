"""Writes and reads Megatron's own files of a checkpoint, with one-line errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_magi.adapter.compat import write_checkpoints_in_process
from megatron_magi.training.checkpoint.pickled_parts import UnsafeCheckpointError, check_pickles
from megatron_magi.training.recipe.recipe_error import RecipeError


def save_tensors(sharded: dict[str, Any], folder: Path) -> None:
    """Write the checkpoint that `sharded` describes into a folder; every rank calls it.

    Raises:
        OSError: a file could not be written. If it holds tensors, all ranks raise it. If it is one
            of the small files of rank 0, only rank 0 does, and the others end with its process, as
            after any rank's error.
    """
    write_checkpoints_in_process()
    try:
        dist_checkpointing.save(sharded, str(folder), ("torch_dist", 1))
    except (OSError, RuntimeError, CheckpointException) as error:  # torch's writers raise all three
        raise OSError(_first_line(error)) from error


def load_tensors(sharded: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The tensors of the checkpoint in `folder` that `sharded` describes; every rank calls it.

    Raises:
        UnsafeCheckpointError: loading it could run code; none was run.
        RecipeError: its files cannot be read, or hold other tensors than `sharded` describes.
    """
    with _readable(folder):
        check_pickles(folder)
        loaded: dict[str, Any] = dist_checkpointing.load(sharded, str(folder))
        return loaded


def saved_dtype(folder: Path, name: str) -> torch.dtype:
    """The dtype of a tensor in the checkpoint in `folder`.

    Raises:
        UnsafeCheckpointError: loading it could run code; none was run.
        RecipeError: its files cannot be read, or have no such tensor.
    """
    with _readable(folder):
        check_pickles(folder)
        metadata: Any = dist_checkpointing.load_tensors_metadata(str(folder))
        dtype: torch.dtype = metadata[name].dtype
        return dtype


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except UnsafeCheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # damaged bytes may cause any error
        raise RecipeError(
            f"a checkpoint must be readable and of this model, got {_first_line(error)} in "
            f"{folder}; restore it, or remove it to go on from another"
        ) from error


def _first_line(error: BaseException) -> str:
    """The first line of the first error that the ranks report."""
    if isinstance(error, CheckpointException):
        if not error.failures:
            return "an error that another rank reports"
        error = next(iter(error.failures.values()))[0]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].removeprefix("Worker failure: ") if lines else ""
    return text if text.startswith("[Errno") else f"{type(error).__name__}: {text}"
