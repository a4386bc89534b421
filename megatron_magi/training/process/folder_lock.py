"""One run in a folder at a time: a lock that the system gives back when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_magi.training.recipe.recipe_error import RecipeError

NAME = ".lock"
"""The file that is locked, in the folder; it stays there and has the name of its last holder."""


@contextlib.contextmanager
def locked_folders(folders: Iterable[Path]) -> Iterator[None]:
    """Hold the locks of these folders, which exist or can be made.

    A file system without locks holds nothing and is no error.

    Raises:
        RecipeError: another process holds one; the message names it.
        OSError: a folder cannot be written.
    """
    with contextlib.ExitStack() as held:
        for folder in dict.fromkeys(path.resolve() for path in folders):
            held.enter_context(_locked(folder))
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / NAME).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RecipeError(
                f"a folder takes one run at a time, got {folder}, where process "
                f"{file.read().strip() or 'of another host'} is running; stop it, or set another "
                f"name= or checkpoint.dir="
            ) from None
        except OSError:  # this file system has no locks
            yield
            return
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
