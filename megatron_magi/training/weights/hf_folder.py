"""The *.safetensors files of a HuggingFace folder, read and written tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.weights.hf_weights import hf_shape

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class HfTensor:
    """A tensor in a file, not read yet."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """The dtype by safetensors' name: BF16, F16, F32, ..."""


def list_tensors(folder: Path) -> dict[str, HfTensor]:
    """Every tensor of a folder by name, from the headers of its files.

    Raises:
        RecipeError: no safetensors files, one that the index names is missing or broken, or the
            safetensors package is not installed.
    """
    found: dict[str, HfTensor] = {}
    for file in _files(folder):
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118  the file is no mapping
                head = opened.get_slice(name)
                found[name] = HfTensor(file, tuple(head.get_shape()), head.get_dtype())
    return found


def common_dtype(tensors: Mapping[str, HfTensor]) -> torch.dtype:
    """The one dtype of all tensors.

    Raises:
        RecipeError: several dtypes, or one that weights here cannot have.
    """
    examples = {t.dtype: name for name, t in tensors.items()}
    if len(examples) != 1 or not set(examples) <= set(DTYPES):
        got = ", ".join(f"{dtype} ({name})" for dtype, name in sorted(examples.items()))
        raise RecipeError(
            f"all tensors must have one dtype of {', '.join(DTYPES)}, got {got or 'no tensor'}; "
            f"convert the folder to one of them"
        )
    return DTYPES[next(iter(examples))]


def read_tensors(tensors: Mapping[str, HfTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor with its name, one at a time, every file opened once."""
    for file in dict.fromkeys(t.file for t in tensors.values()):
        with _opened(file) as opened:
            for name, tensor in tensors.items():
                if tensor.file == file:
                    yield name, opened.get_tensor(name)


def write_tensors(
    folder: Path, views: Mapping[str, torch.Tensor], max_file_bytes: int
) -> list[Path]:
    """Write `views` as files of at most `max_file_bytes` (or one tensor), with an index if several.

    Holds a copy of one file's tensors at a time.
    """
    save_file = _safetensors().torch.save_file
    groups = split_by_size(
        {n: v.numel() * v.element_size() for n, v in views.items()}, max_file_bytes
    )
    n = len(groups)
    files = (
        [SINGLE] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    )
    for file, names in zip(files, groups, strict=True):
        copies = {n: views[n].reshape(hf_shape(views[n])).contiguous() for n in names}
        save_file(copies, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        total = sum(v.numel() * v.element_size() for v in views.values())
        where = {n: file for file, names in zip(files, groups, strict=True) for n in names}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [folder / file for file in files]


def split_by_size(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in their order, cut into groups whose sizes sum to at most `limit`, or single ones."""
    groups: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not groups or used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            where = json.loads(index.read_text())["weight_map"]
            files = [folder / name for name in sorted(set(where.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecipeError(
                f"{index} must be JSON with a weight_map, got {error!r}; download it again"
            ) from None
    else:
        files = [folder / SINGLE]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise RecipeError(
            f"a HuggingFace folder needs {SINGLE}, or {INDEX} and the files it names, got no "
            f"{', '.join(absent)} in {folder}; download them, or save with safetensors"
        )
    return files


def _opened(file: Path) -> Any:
    package = _safetensors()
    try:
        return package.safe_open(str(file), framework="pt")
    except package.SafetensorError as error:
        raise RecipeError(
            f"{file} must be a whole safetensors file, got {error}; download it again"
        ) from None


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise RecipeError(
            f"HuggingFace weights need the safetensors package, got {error}; "
            f"pip install 'megatron-magi[weights]'"
        ) from None
    return safetensors
