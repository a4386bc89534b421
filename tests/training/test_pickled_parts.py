"""A checkpoint that somebody changed cannot run code when it is loaded; an unchanged one loads."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megatron_magi.training.checkpoint import tensor_files
from megatron_magi.training.checkpoint.pickled_parts import UnsafeCheckpointError, check_pickles

ROOT = Path(__file__).parents[2]
LOAD_ATTACKED = """
import os, pickle, sys, torch
from pathlib import Path
from megatron_magi.training.process.processes import one_process

class Evil:
    def __init__(self, place): self.place = place
    def __reduce__(self): return os.mkdir, (self.place,)

def in_metadata(folder, place):
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(place)))

def in_a_field(folder, place):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Evil(place)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))

def in_an_object(folder, place, name="random"):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    torch.save(Evil(place), folder / "evil.distcp")
    for index, stored in metadata.storage_data.items():
        if index.fqn.startswith(name):
            stored.relative_path, stored.offset = "evil.distcp", 0
            stored.length = (folder / "evil.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))

def untouched(folder, place):
    pass

with one_process():
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron_magi.training.checkpoint import tensor_files
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8)),
             "random": ShardedObject("random", {"torch": torch.get_rng_state()}, (1,), (0,))}
    for attack in (untouched, in_metadata, in_a_field, in_an_object):
        folder, place = Path(sys.argv[1]) / attack.__name__, sys.argv[1] + "/ran"
        folder.mkdir()
        tensor_files.save_tensors(state, folder)
        attack(folder, place)
        check = tensor_files.check_pickles
        for name in ("checked", "unchecked"):
            if name == "unchecked":
                tensor_files.check_pickles = lambda folder: None
            try:
                said = sorted(tensor_files.load_tensors(state, folder))
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            print(attack.__name__, name, os.path.isdir(place), said)
            if os.path.isdir(place):
                os.rmdir(place)
        tensor_files.check_pickles = check
"""


def test_an_attack_runs_nothing_and_would_have_run(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-W", "ignore", "-c", LOAD_ATTACKED, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    said = re.findall(r"^(\w+) (checked|unchecked) (True|False) (.*)$", run.stdout, re.M)
    assert len(said) == 8, run.stderr[-2000:]
    assert [s[3] for s in said if s[0] == "untouched"] == ["['random', 'w']"] * 2
    for attack, check, ran, text in said:
        assert ran == str(attack != "untouched" and check == "unchecked"), (attack, check)
        if attack != "untouched" and check == "checked":
            file = "evil.distcp" if attack == "in_an_object" else ".metadata"
            assert text.startswith("UnsafeCheckpointError: a checkpoint may hold tensors, plain ")
            assert f"got {os.name}.mkdir in {tmp_path / attack / file}, which" in text


def checkpoint(folder: Path, value: Any, **stored: Any) -> Path:
    """A checkpoint of one object that is no tensor."""
    torch.save(value, folder / "a.distcp")
    info = _StorageInfo("a.distcp", 0, (folder / "a.distcp").stat().st_size, **stored)
    metadata = Metadata({"x": BytesStorageMetadata()}, storage_data={MetadataIndex("x"): info})
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def test_random_states_and_plain_values_pass(tmp_path: Path) -> None:
    values = {"numpy": np.random.get_state(), "n": (1, 2.0, None, b"x", {"y"}), "t": torch.ones(2)}
    check_pickles(checkpoint(tmp_path, values))


def test_a_class_of_the_list_is_found_by_its_own_name_alone(tmp_path: Path) -> None:
    """A dotted name, or what a module of the list imports, is not in the list."""
    for module, name in (("torch.distributed.checkpoint.metadata", "os.mkdir"), ("torch", "load")):
        (tmp_path / ".metadata").write_bytes(f"c{module}\n{name}\n(S'x'\ntR.".encode())
        with pytest.raises(UnsafeCheckpointError, match=re.escape(f"got {module}.{name} in ")):
            check_pickles(tmp_path)


def test_every_way_to_read_a_checkpoint_is_checked(tmp_path: Path) -> None:
    """The error is as it was found, not one of a checkpoint that is damaged."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(os.getcwd))
    for read in (tensor_files.load_tensors, lambda _, f: tensor_files.saved_dtype(f, "x")):
        with pytest.raises(UnsafeCheckpointError, match=rf"^a checkpoint may .* {os.name}\.getcwd"):
            read({}, tmp_path)


def test_what_cannot_be_seen_through_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(UnsafeCheckpointError, match="got dict in place of Metadata"):
        check_pickles(tmp_path)
    packed = checkpoint(tmp_path, 1, transform_descriptors=["zstd"])
    with pytest.raises(UnsafeCheckpointError, match="got the transforms"):
        check_pickles(packed)


def test_an_object_that_no_tensor_is_described_for_is_read_too(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, torch.nn.Linear(1, 1))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata.clear()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafeCheckpointError, match=r"got torch\.nn\.modules\.linear\.Linear in "):
        check_pickles(folder)
