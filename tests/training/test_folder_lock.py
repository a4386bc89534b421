"""One run in a folder at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from megatron_magi.training.process import folder_lock
from megatron_magi.training.process.folder_lock import locked_folders
from megatron_magi.training.recipe.recipe_error import RecipeError


def test_a_second_holder_is_refused_with_the_first_ones_name(tmp_path: Path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    with locked_folders([tmp_path / "a", shared, shared]):
        with pytest.raises(RecipeError, match=rf"got {shared}, where process {os.getpid()} on "):
            locked_folders([other, shared]).__enter__()
        with locked_folders([other]):  # what the refused one held is free again
            pass
    with locked_folders([shared]):
        pass


def test_a_holder_that_dies_gives_its_lock_back(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        locked_folders([tmp_path]).__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / ".lock").read_text().startswith(f"{child} on ")
    with locked_folders([tmp_path]):
        assert (tmp_path / ".lock").read_text().startswith(f"{os.getpid()} on ")


def test_a_file_system_without_locks_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(folder_lock.fcntl, "flock", no_locks)
    with locked_folders([tmp_path]), locked_folders([tmp_path]):
        assert fcntl.flock is no_locks
