"""Megatron's files of a checkpoint: what is written is read, and errors are one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_magi.training.checkpoint import tensor_files
from megatron_magi.training.recipe.recipe_error import RecipeError
from tests.training.full_disk import needs_full

ROOT = Path(__file__).parents[2]
WRITE_TENSORS = """
import sys, torch
from pathlib import Path
from megatron_magi.training.process.processes import one_process
with one_process():
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron_magi.training.checkpoint.tensor_files import (
        load_tensors, save_tensors, saved_dtype,
    )
    sharded = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8)), "number": 5}
    for name in (".metadata.tmp", "metadata.json", "nothing"):
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        (folder / name).symlink_to("/dev/full")
        try:
            save_tensors(sharded, folder)
            print("no error", load_tensors(sharded, folder)["number"], saved_dtype(folder, "w"))
        except OSError as error:
            print(name, error)
"""


@needs_full
def test_every_file_of_megatron_tells_of_a_full_disk(tmp_path: Path) -> None:
    """Those that rank 0 writes alone; test_full_disk.py is about the others."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", WRITE_TENSORS, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.stderr == ""
    said = run.stdout.splitlines()
    assert [line.split()[0] for line in said[:2]] == [".metadata.tmp", "metadata.json"]
    assert said[2:] == ["no error 5 torch.float32"]


def test_a_folder_without_tensors_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    for read in (tensor_files.load_tensors, lambda _, f: tensor_files.saved_dtype(f, "w")):
        with pytest.raises(RecipeError) as error:
            read({}, tmp_path / "nothing")
        said = str(error.value)
        assert said.startswith("a checkpoint must be readable and of this model, got ")
        assert said.endswith("nothing; restore it, or remove it to go on from another")
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (RuntimeError("\n  [enforce fail at x]\nmore"), "RuntimeError: [enforce fail at x]"),
        (RuntimeError("Worker failure: [Errno 27] File too large"), "[Errno 27] File too large"),
        (RuntimeError(), "RuntimeError: "),
        (CheckpointException("", {1: (KeyError("w"), None)}), "KeyError: 'w'"),
        (CheckpointException("", {}), "an error that another rank reports"),
    ],
    ids=["of_the_system", "many_lines", "of_a_worker", "empty", "of_a_rank", "of_others"],
)
def test_what_torchs_writers_raise_is_an_oserror_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(tensor_files, "write_checkpoints_in_process", lambda: None)
    monkeypatch.setattr(tensor_files.dist_checkpointing, "save", fails)
    with pytest.raises(OSError) as found:
        tensor_files.save_tensors({}, tmp_path)
    assert str(found.value) == said and found.value.__cause__ is error
