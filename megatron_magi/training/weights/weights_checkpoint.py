"""Converts a HuggingFace Llama folder to a checkpoint of weights, and any checkpoint to a folder.

One process on the CPU. It holds the weights once, and a few more tensors; nothing is trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from megatron_magi.training.checkpoint.checkpoint import sharded_weights
from megatron_magi.training.checkpoint.checkpoint_facts import Checkpoint
from megatron_magi.training.checkpoint.checkpoint_folder import (
    find_checkpoint,
    finish_weights,
)
from megatron_magi.training.checkpoint.tensor_files import load_tensors, save_tensors, saved_dtype
from megatron_magi.training.process.processes import one_process
from megatron_magi.training.process.whole_files import filled_folder
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import DataConfig, ModelConfig, ParallelConfig
from megatron_magi.training.run.model import undrawn_model
from megatron_magi.training.weights.hf_config import (
    CONFIG,
    check_same_model,
    hf_from_model,
    read_hf_model,
)
from megatron_magi.training.weights.hf_folder import (
    HfTensor,
    common_dtype,
    list_tensors,
    read_tensors,
    write_tensors,
)
from megatron_magi.training.weights.hf_weights import (
    check_tensors,
    clear_padding,
    hf_shape,
    hf_views,
)

EMBEDDING = "embedding.word_embeddings.weight"
"""The name of a parameter that every model has."""


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote."""

    path: Path
    num_tensors: int
    """Number of tensors in the HuggingFace folder."""
    num_bytes: int
    """Size of these tensors."""
    dtype: str
    notes: tuple[str, ...] = ()
    """Lines for the log on newer checkpoints that were skipped."""


def import_weights(folder: Path, config: RunConfig, out: Path) -> Converted:
    """Write the weights of a HuggingFace folder as a checkpoint, for runs with config's model.

    They keep their dtype; a run rounds them to its own.

    Raises:
        RecipeError: a model without a counterpart, other tensors than it has, a recipe of another
            model, or something at `out`.
    """
    _check_empty(out)
    check_same_model(config.model, read_hf_model(folder), folder)
    tensors = list_tensors(folder)
    dtype = common_dtype(tensors)
    with one_process():
        weights = _Weights(config.model, dtype)
        wanted = {name: hf_shape(view) for name, view in weights.views.items()}
        check_tensors({n: t.shape for n, t in tensors.items()}, wanted)
        weights.fill(tensors)
        with filled_folder(out) as partial:
            save_tensors(sharded_weights([weights.gpt]), partial)
            finish_weights(partial, replace(config, parallel=ParallelConfig()))
    return _summary(out, weights.views, dtype)


def export_weights(path: Path, out: Path, max_file_bytes: int) -> Converted:
    """Write the weights of a checkpoint (or the newest in a folder) as a HuggingFace folder.

    They keep the dtype of the run that saved them. Rows of the padded vocabulary are left out.

    Raises:
        RecipeError: no whole checkpoint at `path`, or something at `out`.
    """
    _check_empty(out)
    choice = find_checkpoint(path)
    checkpoint = choice.checkpoint
    if checkpoint is None:
        raise RecipeError(
            f"an export needs a whole checkpoint, got none in {path}; name a folder iter_NNNNNNN, "
            f"a run's checkpoints or imported weights"
        )
    saved = checkpoint.recipe["model"]
    model = ModelConfig(**{f.name: saved[f.name] for f in fields(ModelConfig) if f.name in saved})
    with one_process():
        weights = _Weights(model, saved_dtype(checkpoint.path, EMBEDDING))
        weights.load(checkpoint.path)
        with filled_folder(out) as partial:
            write_tensors(partial, weights.views, max_file_bytes)
            text = json.dumps(_hf_config(checkpoint, weights), indent=2)
            (partial / CONFIG).write_text(text + "\n")
            partial.rename(out)
    return replace(_summary(out, weights.views, weights.dtype), notes=choice.notes)


class _Weights:
    """Every parameter of a model, whole, and HuggingFace's tensors as views of them."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        no_data = DataConfig(path="none", eod_token=0)
        run = RunConfig(name="weights", model=replace(model, fused="off"), data=no_data)
        self.gpt = undrawn_model(run, dtype)
        self.ours = {name: p.detach() for name, p in self.gpt.named_parameters()}
        self.views = hf_views(self.ours, model)

    def fill(self, tensors: Mapping[str, HfTensor]) -> None:
        """Copy from the files; rows of the padded vocabulary become 0."""
        clear_padding(self.ours, self.model)
        for name, tensor in read_tensors({n: tensors[n] for n in self.views}):
            self.views[name].copy_(tensor.view(self.views[name].shape))

    def load(self, path: Path) -> None:
        loaded = load_tensors(sharded_weights([self.gpt]), path)
        self.gpt.load_state_dict(loaded["model"])


def _hf_config(checkpoint: Checkpoint, weights: _Weights) -> dict[str, Any]:
    data, hf = checkpoint.recipe["data"], hf_from_model(weights.model)
    length = max(data["seq_length"], hf.get("max_position_embeddings", 0))
    return {
        **hf,
        "max_position_embeddings": length,
        "bos_token_id": None,
        "eos_token_id": data["eod_token"],
        "torch_dtype": _dtype_name(weights.dtype),
    }


def _summary(path: Path, views: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Converted:
    num_bytes = sum(v.numel() * v.element_size() for v in views.values())
    return Converted(path, len(views), num_bytes, _dtype_name(dtype))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(
            f"the result needs a folder that is new or empty, got {out}; remove it, or name another"
        )
