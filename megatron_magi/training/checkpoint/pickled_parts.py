"""Refuses a checkpoint whose pickles would do more than make plain values, before torch opens it.

Torch reads `.metadata` with pickle, and so it reads those objects of a .distcp file that are not
tensors; a pickle can call any function. Tensors and Megatron's common.pt are read with
weights_only. So this module reads the same bytes first, with a list of what may be in them.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_magi.training.recipe.recipe_error import RecipeError

METADATA = ".metadata"
CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    },
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "collections": {"OrderedDict"},
    "builtins": {"set"},
}
"""By module, what the description of a checkpoint's tensors consists of; dtypes may be in it too.
None of them does anything when it is made."""


class UnsafeCheckpointError(RecipeError):
    """A checkpoint whose loading would call something that no checkpoint of a run needs."""

    def __init__(self, found: str, path: Path) -> None:
        super().__init__(
            f"a checkpoint may hold tensors, plain values and torch's descriptions of them alone, "
            f"got {found} in {path}, which could run anything; nothing was loaded: take a "
            f"checkpoint that you trust, or its weights as safetensors (megatron-magi weights)"
        )


def check_pickles(folder: Path) -> None:
    """Read all pickles of the checkpoint in `folder` that torch would open without a list.

    Raises:
        UnsafeCheckpointError: one holds more than plain values; none of it was called.
        Exception: whatever damaged bytes cause.

    Cost: `.metadata` is read once more, and so are the objects that are not tensors.
    """
    metadata = _read_metadata(folder / METADATA)
    described = metadata.state_dict_metadata
    for index, stored in metadata.storage_data.items():
        if type(described.get(index.fqn)) is not TensorStorageMetadata:
            _check_object(folder / stored.relative_path, stored)


class _Unpickler(pickle.Unpickler):
    """Finds classes of the list, and dtypes, and nothing else."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise UnsafeCheckpointError(f"{module}.{name}", self.path)


def _read_metadata(path: Path) -> Metadata:
    metadata = _Unpickler(path).load()
    if type(metadata) is not Metadata:
        raise UnsafeCheckpointError(f"{type(metadata).__name__} in place of Metadata", path)
    return metadata


def _check_object(path: Path, stored: Any) -> None:
    """Read one stored object with weights_only; what passes calls nothing when it is read again."""
    if stored.transform_descriptors:
        raise UnsafeCheckpointError(f"the transforms {stored.transform_descriptors}", path)
    with open(path, "rb") as file:
        file.seek(stored.offset)
        data = io.BytesIO(file.read(stored.length))
    try:
        with torch.serialization.safe_globals(_numpy_arrays()):
            torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)|global ([\w.]+)", str(error))
        name = next(filter(None, found.groups())) if found else "a pickle that torch refuses"
        raise UnsafeCheckpointError(name, path) from error


def _numpy_arrays() -> list[Any]:
    """What an array of numpy's random state is made of, by the names of numpy 1 and 2."""
    rebuild = np.zeros(0).__reduce__()[0]
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    return [np.ndarray, np.dtype, type(np.dtype(np.uint32)), *((rebuild, name) for name in names)]
