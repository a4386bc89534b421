"""Gradients that Megatron saves with --save-wgrads-interval: wgrads/iter_N/mp_rank_*.pth.

A file holds the gradients of one rank by model chunk and parameter. Its name has the
tensor-parallel rank, then the pipeline stage and the expert rank where there are several. Layers
and experts are numbered within the file, so they get their numbers in the whole model here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_magi.compare.run_error import RunError

Gradient = npt.NDArray[np.float32]
Pieces = dict[str, list[Gradient]]
"""A parameter's gradient as its tensor-parallel ranks hold it."""
LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
EXPERT = re.compile(
    r"(?<=experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc\d\.)(?:weight|bias)\d+"
)
REPLICATED = re.compile(r"norm|router|position_embeddings|linear_(proj|fc2)\.bias")
"""Parameters that every tensor-parallel rank holds whole."""
BY_ROWS = re.compile(
    r"word_embeddings|output_layer|linear_(qkv|fc1|q|k|v)\b|_up_proj|linear_q_proj"
)
BY_COLUMNS = re.compile(r"linear_(proj|fc2)\.weight")


def saved_iterations(run: Path) -> list[int]:
    """Iterations whose gradients Megatron saved, in order."""
    return sorted(int(path.name[5:]) for path in _folder(run).glob("iter_*"))


def read_wgrads(run: Path, iteration: int) -> Pieces:
    """Every parameter's gradient, by its name in the whole model.

    Raises:
        RunError: torch is not installed, a file is missing or broken, or it holds experts that
            this module cannot number.

    Cost: maps the files; a gradient is read when it is used, and converted if it is not fp32.
    """
    files = _read_files(_folder(run) / f"iter_{iteration:07d}")
    found: Pieces = {}
    for expert_rank in sorted({ep for _, _, ep in files}):
        for tp in sorted({tp for tp, _, _ in files}):
            for name, gradient in _whole_stages(files, tp, expert_rank):
                of_experts = "experts." in name.replace("shared_experts", "")
                if (tp and REPLICATED.search(name)) or (expert_rank and not of_experts):
                    continue  # the first rank holds the same
                found.setdefault(name, []).append(gradient)
    return found


def joined(pieces: Pieces) -> Pieces:
    """Gradients of whole parameters, from those of tensor-parallel ranks.

    Raises:
        RunError: a parameter of which it is not known how Megatron splits it.
    """
    return {name: [_joined(name, parts, pieces)] for name, parts in pieces.items()}


def without_tied_output(pieces: Pieces) -> Pieces:
    """The same without the copy of a tied embedding that the last pipeline stage holds."""
    output = pieces.get("output_layer.weight")
    embedding = pieces.get("embedding.word_embeddings.weight")
    if output and embedding and all(map(np.array_equal, output, embedding)):
        return {name: p for name, p in pieces.items() if name != "output_layer.weight"}
    return pieces


def _folder(run: Path) -> Path:
    """RUN/wgrads, or that of the checkpoints' folder in it."""
    return next(iter(sorted(run.glob("*/wgrads"))), run / "wgrads")


def _read_files(folder: Path) -> dict[tuple[int, int, int], dict[str, dict[str, Any]]]:
    """Contents of the files by (tensor-parallel rank, pipeline stage, expert rank)."""
    try:
        import torch
    except ImportError as error:
        raise RunError(f"reading {folder} needs torch ({error}); pip install torch") from error
    found = {}
    for path in sorted(folder.glob("mp_rank_*.pth")):
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # torch raises several kinds for a broken file
            raise RunError(
                f"saved gradients must be readable, got {error} for {path}; save them again"
            ) from None
        tp, *others = (int(number) for number in path.stem.removeprefix("mp_rank_").split("_"))
        ranks = tp, *others
        found[ranks] = content
    return _placed(found, folder)


def _placed(found: Mapping[tuple[int, ...], Any], folder: Path) -> dict[tuple[int, int, int], Any]:
    """A file name with one number more is a stage's or an expert rank's, which hold equal names."""
    of_experts = len({str({c: sorted(p) for c, p in x.items()}) for x in found.values()}) == 1
    placed = {}
    for (tp, *others), content in found.items():
        if len(others) == 1 and of_experts:
            others = [0, *others]
        stage, expert = [*others, 0, 0][:2]
        placed[tp, stage, expert] = content
    sizes = [len(set(ranks)) for ranks in zip(*placed, strict=True)]
    if not placed or len(placed) != np.prod(sizes):
        raise RunError(
            f"saved gradients must have a file for every tensor, pipeline and expert rank, got "
            f"{sorted(p.name for p in folder.iterdir())} in {folder}; save them again, with "
            f"--expert-tensor-parallel-size as --tensor-model-parallel-size"
        )
    return placed


def _whole_stages(files: Mapping[Any, Any], tp: int, expert: int) -> list[tuple[str, Gradient]]:
    """Gradients of one rank of each stage; layers count through chunk 0 of all stages first."""
    stages = [files[tp, stage, expert] for stage in sorted({stage for _, stage, _ in files})]
    found, first_layer = [], 0
    for chunk in sorted({name for stage in stages for name in stage}):
        for parameters in (stage[chunk] for stage in stages if chunk in stage):
            experts = _count(EXPERT, parameters)
            for name, gradient in parameters.items():
                name = LAYER.sub(lambda m: str(int(m[0]) + first_layer), name)  # noqa: B023
                if expert:
                    name = _of_expert_rank(name, expert * experts)
                found.append((name, gradient.float().numpy()))
            first_layer += _count(LAYER, parameters)
    return found


def _count(pattern: re.Pattern[str], names: Mapping[str, Any]) -> int:
    """How many numbers the pattern finds: of layers, or of experts."""
    found = {re.sub(r"\D", "", m[0]) for m in map(pattern.search, names) if m}
    return len(found)


def _of_expert_rank(name: str, first: int) -> str:
    if ".experts." in name and not EXPERT.search(name):
        raise RunError(
            f"experts of several ranks must be numbered, got {name}; save gradients with "
            f"--expert-model-parallel-size 1, or with --moe-grouped-gemm of TransformerEngine"
        )
    return EXPERT.sub(lambda m: re.sub(r"\d+", lambda n: str(int(n[0]) + first), m[0]), name)


def _joined(name: str, parts: list[Gradient], pieces: Pieces) -> Gradient:
    if len(parts) == 1:
        return parts[0]
    if BY_COLUMNS.search(name):
        return np.concatenate(parts, axis=1)
    if not BY_ROWS.search(name):
        raise RunError(
            f"gradients of another tensor-parallel size are joined for attention, MLP and "
            f"embedding, got {name}; save both with one --tensor-model-parallel-size"
        )
    second = pieces.get(name.replace("linear_fc1", "linear_fc2").replace("bias", "weight"))
    if "linear_fc1" in name and second and len(parts[0]) == 2 * second[0].shape[1]:
        halves = [part.reshape(2, -1, *part.shape[1:]) for part in parts]  # gate, then up
        return np.concatenate(halves, axis=1).reshape(-1, *parts[0].shape[1:])
    return np.concatenate(parts)
