"""Files that appear together and complete, or not at all, and folders that do so by renaming."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_magi.training.process.stop import StopRequest
from megatron_magi.training.recipe.recipe_error import RecipeError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Numbers of errors that occur only in writing."""


def cannot_write(what: str, where: Path, error: BaseException, remedy: str) -> RecipeError:
    """The one-line error of something that could not be written below `where`."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return RecipeError(
        f"{what} needs room and a folder that it can write, got {lines[0].strip()} in "
        f"{where}{_free_room(where)}; {remedy}"
    )


@contextmanager
def written_whole(targets: Sequence[Path]) -> Iterator[list[Path]]:
    """Names beside `targets` to write to; renamed to `targets` if the block succeeds, else removed.

    What was there before stays until the new files are complete, also when the block is
    interrupted. SIGINT and SIGTERM wait for the renaming, which takes microseconds.

    Raises:
        RecipeError: a target is a folder, its folder cannot be written, or the disk is full.
    """
    partial = [t.with_name(f".{t.name}.{os.getpid()}.partial") for t in targets]
    remedy = "make room, or choose another place; what was there before is as it was"
    try:
        _begin(targets, partial, remedy)
        yield partial
        with StopRequest() as stop:
            for written, target in zip(partial, targets, strict=True):
                written.replace(target)
        if stop.signal_number:
            signal.raise_signal(stop.signal_number)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise cannot_write(
            f"writing {targets[0].name}", targets[0].parent, error, remedy
        ) from error
    finally:
        for written in partial:
            with contextlib.suppress(OSError):  # its own error says more
                written.unlink(missing_ok=True)


def partial_folder(path: Path) -> Path:
    """An empty folder beside `path` to write into, and to rename to `path` when it is whole."""
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


@contextmanager
def filled_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` to fill; removed if the block fails."""
    partial = partial_folder(path)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def replace_folder(partial: Path, path: Path) -> None:
    """Rename a folder that was filled to `path`; what was there stays until then."""
    before = path.with_name(f"{path.name}.before.partial")
    shutil.rmtree(before, ignore_errors=True)
    if path.exists():
        path.rename(before)
    partial.rename(path)
    shutil.rmtree(before, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a whole folder; a partly removed one never has its name."""
    going = path.rename(path.with_name(f"{path.name}.removed.partial"))
    shutil.rmtree(going)


def _begin(targets: Sequence[Path], partial: Sequence[Path], remedy: str) -> None:
    """Raise before any work if its result could not be written."""
    for target in targets:
        if target.is_dir():
            raise RecipeError(
                f"a file to write must not be a folder, got {target}; choose another name"
            )
    for target, written in zip(targets, partial, strict=True):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            written.touch()
        except OSError as error:
            raise cannot_write(f"writing {target.name}", target.parent, error, remedy) from error


def _free_room(where: Path) -> str:
    """Free space of a disk, as a part of a sentence."""
    try:
        free = shutil.disk_usage(where).free
    except OSError:
        return ""
    return f" ({free / 2**30:.2f} GiB free)"
