"""Saves and resumes a run by Megatron's distributed checkpoints (format torch_dist).

Weights and optimizer state are stored by their global names and shapes, so any other tensor,
pipeline, context or data parallel size loads them. Random states belong to a (pipeline, tensor)
layout and are loaded only under the same one. This package adds only checkpoint.json. A checkpoint
of weights alone (weights/) starts a run and does not resume one.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_magi.adapter.adam_state import finish_loading, prepare_to_load
from megatron_magi.adapter.model_chunks import model_chunks
from megatron_magi.training.checkpoint.checkpoint_facts import Checkpoint
from megatron_magi.training.checkpoint.checkpoint_folder import (
    OF_THE_FUNCTION,
    changed_order,
    changes,
    checkpoint_folder,
    choose_checkpoint,
    finish,
    interrupted_group,
    not_written,
    open_partial,
)
from megatron_magi.training.checkpoint.tensor_files import load_tensors, save_tensors
from megatron_magi.training.process.rank_0 import from_rank_0
from megatron_magi.training.recipe.run_config import RunConfig


@dataclass
class TrainingState:
    """Everything of a run that changes while it trains."""

    chunks: list[Any]
    """Model chunks of this rank in their wrappers."""
    optimizer: Any
    scheduler: Any
    iteration: int = 0
    """Number of completed iterations."""
    consumed_samples: int = 0
    data_sha256: str | None = None
    """The checksum of the packed data when the run began, since the file may be replaced."""


def save(state: TrainingState, config: RunConfig) -> Path:
    """Write a checkpoint of `state`; every rank calls it at the same iteration.

    Returns:
        Its path, complete and visible to every rank.

    Raises:
        RecipeError: it could not be written. It is removed, and earlier ones are unchanged.
    """
    folder = checkpoint_folder(config)
    partial = from_rank_0(lambda: open_partial(folder, state.iteration))
    try:
        with parameters_gathered(state.chunks, config):
            save_tensors(_sharded_state(state, is_loading=False, with_random=True), partial)
    except OSError as error:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise not_written(folder, state.iteration, error) from error
    dist.barrier()
    return from_rank_0(
        lambda: finish(
            partial,
            config,
            state.iteration,
            state.consumed_samples,
            dist.get_world_size(),
            state.data_sha256,
        )
    )


def resume(state: TrainingState, config: RunConfig) -> list[str]:
    """Load what config.checkpoint.load asks for into `state`; every rank calls it.

    Weights alone keep iteration 0, the fresh optimizer and the fresh schedule.

    Returns:
        Lines for the log: what was loaded, and what was skipped.

    Raises:
        RecipeError: nothing to load, or a checkpoint of another model, the same on every rank; or
            one that cannot be read.
    """
    choice = from_rank_0(lambda: choose_checkpoint(config))
    checkpoint = choice.checkpoint
    if checkpoint is None:
        return list(choice.notes)
    if checkpoint.weights_only:
        return [*_start_from(checkpoint, state, config), *choice.notes]
    saved = checkpoint.recipe["parallel"]
    p = config.parallel
    same_ranks = (saved["tp"], saved["pp"]) == (p.tp, p.pp)
    with parameters_gathered(state.chunks, config):
        loaded = load_tensors(
            _sharded_state(state, is_loading=True, with_random=same_ranks), checkpoint.path
        )
        _load_weights(state.chunks, loaded)
    with _recipe_settings(state.optimizer, loaded["optimizer"]):
        state.optimizer.load_state_dict(loaded["optimizer"])
    finish_loading(state.optimizer)
    state.scheduler.load_state_dict(loaded["scheduler"])
    if same_ranks:
        _set_random_state(loaded["random"])
    state.iteration = checkpoint.iteration
    state.consumed_samples = checkpoint.consumed_samples
    lines = [
        f"resumed: {checkpoint.path}, iteration {checkpoint.iteration}, "
        f"{checkpoint.consumed_samples} samples consumed, saved under {checkpoint.layout}"
    ]
    function = changes(checkpoint, config, OF_THE_FUNCTION)
    if function:
        lines.append(f"note: the same weights now compute something else ({'; '.join(function)})")
    order = changed_order(checkpoint, config, state.data_sha256)
    if order:
        lines.append(f"note: sample numbers now mean other tokens ({'; '.join(order)})")
    elif (note := interrupted_group(checkpoint, config)) is not None:
        lines.append(note)
    return [*lines, *choice.notes]


def sharded_weights(chunks: list[Any]) -> dict[str, Any]:
    """Megatron's description of the weights of each model chunk, to save or to load them."""
    metadata = _metadata()
    return {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(chunks)
    }


def _start_from(checkpoint: Checkpoint, state: TrainingState, config: RunConfig) -> list[str]:
    """Load the weights, also as the optimizer's main weights, and nothing else."""
    with parameters_gathered(state.chunks, config):
        weights = load_tensors(sharded_weights(state.chunks), checkpoint.path)
        _load_weights(state.chunks, weights)
    state.optimizer.reload_model_params()
    return [
        f"started from imported weights: {checkpoint.path}, at iteration 0 with a fresh optimizer "
        f"and schedule"
    ]


def _load_weights(chunks: list[Any], loaded: dict[str, Any]) -> None:
    for name, chunk in _named_chunks(chunks):
        chunk.load_state_dict(loaded[name])


@contextmanager
def parameters_gathered(chunks: list[Any], config: RunConfig) -> Iterator[None]:
    """Inside, every rank holds current parameters, although gathering them is overlapped."""
    if not config.parallel.overlap_param_gather:
        yield
        return
    for chunk in chunks:
        chunk.disable_forward_pre_hook(param_sync=True)
    yield
    for chunk in chunks:
        chunk.enable_forward_pre_hook()


@contextmanager
def _recipe_settings(optimizer: Any, saved: dict[str, Any]) -> Iterator[None]:
    """Loading replaces a parameter group's settings by the saved ones; put the recipe's back.

    Megatron 0.19 also matches a group with one in `saved` by its learning rates, which are equal in
    all groups of these models. So the saved ones are set to the recipe's before.
    """
    names = ("max_lr", "min_lr", "weight_decay", "betas", "eps")
    kept = [{n: group[n] for n in names if n in group} for group in optimizer.param_groups]
    for group in (saved if "param_groups" in saved else saved["optimizer"])["param_groups"]:
        group.update({n: kept[0][n] for n in ("max_lr", "min_lr") if n in kept[0]})
    yield
    for group, settings in zip(optimizer.param_groups, kept, strict=True):
        group.update(settings)


def _metadata() -> dict[str, Any]:
    return {
        # Optimizer state by parameter, however it was sharded: the only form that any layout loads.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded_state(state: TrainingState, is_loading: bool, with_random: bool) -> dict[str, Any]:
    sharded = sharded_weights(state.chunks)
    if is_loading:
        prepare_to_load(state.optimizer)
    sharded["optimizer"] = state.optimizer.sharded_state_dict(
        dict(sharded), is_loading=is_loading, metadata=_metadata()
    )
    sharded["scheduler"] = state.scheduler.state_dict()
    if with_random:
        sharded["random"] = _sharded_random_state()
    return sharded


def _named_chunks(chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    """Megatron's names: "model", or "model0", "model1", ... of virtual pipeline stages."""
    for index, chunk in enumerate(model_chunks(chunks)):
        yield ("model" if len(chunks) == 1 else f"model{index}"), chunk


def _sharded_random_state() -> ShardedObject:
    """One state per (pipeline, tensor) rank; data and context parallel ranks share it."""
    pp = parallel_state.get_pipeline_model_parallel_group()
    tp = parallel_state.get_tensor_model_parallel_group()
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject(
        "random",
        state,
        (pp.size(), tp.size()),
        (pp.rank(), tp.rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
