"""Files that appear together and whole, or not at all; folders to fill and rename when whole."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_magi.training.config import RecipeError
from megatron_magi.training.stop import StopRequest


@contextmanager
def written_whole(targets: Sequence[Path]) -> Iterator[list[Path]]:
    """Names beside `targets` to write to; renamed to them where the block ends well, else removed.

    What was there before stays until the new files are complete, also when the block is
    interrupted. SIGINT and SIGTERM wait for the renaming, which takes microseconds.

    Raises:
        RecipeError: a target is a folder.
    """
    for target in targets:
        if target.is_dir():
            raise RecipeError(
                f"a file to write must not be a folder, got {target}; choose another name"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
    partial = [t.with_name(f".{t.name}.{os.getpid()}.partial") for t in targets]
    try:
        yield partial
        with StopRequest() as stop:
            for written, target in zip(partial, targets, strict=True):
                written.replace(target)
        if stop.signal_number:
            signal.raise_signal(stop.signal_number)
    finally:
        for written in partial:
            written.unlink(missing_ok=True)


def partial_folder(path: Path) -> Path:
    """An empty folder beside `path` to write into, and to rename to `path` when it is whole."""
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial
