"""Functions that tests/adapter/layout_worker.py runs on every rank of a world; JSON in and out."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_magi.adapter.init import named_global_parameters
from megatron_magi.adapter.model_chunks import model_chunks
from megatron_magi.training.checkpoint.checkpoint import TrainingState
from megatron_magi.training.data.packed_samples import PackedDataset
from megatron_magi.training.process import processes
from megatron_magi.training.recipe.recipe import build_config
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.run import loop, model
from megatron_magi.training.run.microbatch import microbatch_streams
from megatron_magi.training.run.model import build_optimizer
from megatron_magi.training.run.step import StepSchedule, TrainingStopped

processes.quiet_megatron()


def train(
    recipe: dict[str, Any], signal_at: int | None = None, file_bytes: int | None = None
) -> Any:
    """Losses and gradient norms of a run, bit for bit; or the one-line error that ended it.

    Args:
        recipe: keys and values of a `RunConfig`, nested.
        signal_at: iteration in which the last rank gets SIGTERM.
        file_bytes: no file grows beyond it, as on a disk that is nearly full.
    """
    config = _config(recipe)
    processes._initialize_megatron(config)
    if file_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    if (
        signal_at is not None
        and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    ):
        _send_signal_in(signal_at)
    draws = _draw_after_each_step() if config.parallel.tp == config.parallel.pp == 1 else {}
    try:
        records = loop.train(config)
    except (RecipeError, TrainingStopped) as error:
        return f"{type(error).__name__}: {error}"
    return [
        [r.iteration, r.lm_loss.hex(), r.grad_norm.hex(), str(r.validation_loss),
         draws.get(r.iteration)]
        for r in records
    ]  # fmt: skip


def cut_file(path: str, is_of_earlier_version: bool = False) -> None:
    """Leave half of a checkpoint's file; an earlier version has written no sizes."""
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) // 2)
    facts = os.path.join(os.path.dirname(path), "checkpoint.json")
    if is_of_earlier_version:
        with open(facts) as file:
            read = json.load(file)
        del read["sizes"]
        with open(facts, "w") as file:
            json.dump(read, file)


def sample_numbers(recipe: dict[str, Any], count: int) -> list[int]:
    """Numbers of the first samples that this rank trains on."""
    config = _config(recipe)
    processes._initialize_megatron(config)
    dataset = PackedDataset(config.data, config.train.seed)
    model_config, cpu = model.transformer_config(config), torch.device("cpu")
    (stream,) = microbatch_streams(dataset, config, model_config, cpu)
    return [item.sample.index for item in itertools.islice(stream, count)]


def _draw_after_each_step() -> dict[int, list[str]]:
    """Numbers of every random generator, by iteration: what dropout of a model would have drawn."""
    step, draws = loop.train_step, {}

    def with_draws(schedule: Any, streams: Any, dataset: Any, state: Any, *rest: Any) -> Any:
        result = step(schedule, streams, dataset, state, *rest)
        numbers = random.random(), np.random.rand(), torch.rand(()).item()
        draws[state.iteration + 1] = [number.hex() for number in numbers]
        return result

    loop.train_step = with_draws
    return draws


def _send_signal_in(iteration: int) -> None:
    step = loop.train_step

    def with_signal(schedule: Any, streams: Any, dataset: Any, state: Any, *rest: Any) -> Any:
        if state.iteration + 1 == iteration:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(schedule, streams, dataset, state, *rest)

    loop.train_step = with_signal


def _config(recipe: dict[str, Any]) -> RunConfig:
    from omegaconf import OmegaConf

    return build_config([OmegaConf.create(recipe)])


def autograd_gradients(recipe: dict[str, Any], path: str) -> None:
    """Gradients of the first global batch's mean loss by torch.autograd alone, as PATH.npz."""
    run = _built(recipe)
    (gpt,) = model_chunks(run.state.chunks)
    named = dict(named_global_parameters(gpt))
    sums = {name: torch.zeros_like(p) for name, p in named.items()}
    tokens = 0
    for _ in range(run.config.train.global_batch_size):
        group = parallel_state.get_context_parallel_group()
        local = next(run.streams[0]).local(True, torch.device("cpu"), group)
        loss = gpt(**local.model_inputs()) * local.loss_mask
        tokens += int(local.loss_mask.sum())
        for name, g in zip(named, torch.autograd.grad(loss.sum(), named.values()), strict=True):
            sums[name] += g
    np.savez(path, **{name: (total / tokens).numpy() for name, total in sums.items()})


@dataclass
class _Run:
    """All that a step of training needs."""

    config: RunConfig
    state: TrainingState
    dataset: PackedDataset
    streams: list[Any]
    schedule: StepSchedule


def _built(recipe: dict[str, Any]) -> _Run:
    config, cpu = _config(recipe), torch.device("cpu")
    processes._initialize_megatron(config)
    model_config = model.transformer_config(config)
    chunks = model.build_model(config, model_config)
    state = TrainingState(chunks, *build_optimizer(config, chunks))
    dataset = PackedDataset(config.data, config.train.seed)
    streams = microbatch_streams(dataset, config, model_config, cpu)
    return _Run(config, state, dataset, streams, StepSchedule(config, model_config, chunks, cpu))


def measure(recipe: dict[str, Any]) -> dict[str, Any]:
    """What this rank really holds: parameters by global name, bytes by part, saved activations."""
    run = _built(recipe)
    config, chunks, state = run.config, run.state.chunks, run.state
    streams, schedule = run.streams, run.schedule
    saved = _SavedBytes(chunks)
    if config.parallel.pp == 1:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
            local = next(streams[0]).local(
                True, torch.device("cpu"), parallel_state.get_context_parallel_group()
            )
            output = chunks[0](**local.model_inputs())
        del output
    loop.train_step(schedule, streams, run.dataset, state)
    parts = getattr(state.optimizer, "chained_optimizers", [state.optimizer])
    return {
        "parameters": {
            name: list(p.shape)
            for chunk in model_chunks(chunks)
            for name, p in named_global_parameters(chunk)
        },
        "weights": _unique_bytes(p for chunk in chunks for p in chunk.parameters()),
        "gradients": _unique_bytes(b.grad_data for chunk in chunks for b in chunk.buffers),
        "optimizer": _optimizer_bytes(parts, chunks),
        "activations": saved.total,
    }


def peak(recipe: dict[str, Any]) -> int:
    """Most bytes that forward and backward of a global batch allocate at once on this rank.

    Weights, gradient buffers and optimizer state are there before and not counted.
    """
    run = _built(recipe)
    loop.train_step(run.schedule, run.streams, run.dataset, run.state)
    for chunk in run.state.chunks:
        chunk.zero_grad_buffer()
    run.state.optimizer.zero_grad()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run.schedule(run.streams)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(number for _, number in changes))


class _SavedBytes:
    """Bytes of the storages autograd keeps, each counted once, parameters left out."""

    def __init__(self, chunks: list[Any]) -> None:
        self.skip = {p.untyped_storage().data_ptr() for c in chunks for p in c.parameters()}
        self.kept: dict[int, torch.Tensor] = {}

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage().data_ptr()
        if storage not in self.skip and storage not in self.kept:
            self.kept[storage] = x  # alive until the end, so that no address is used twice
        return x

    @property
    def total(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in self.kept.values())


def _unique_bytes(tensors: Any) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _optimizer_bytes(parts: list[Any], chunks: list[Any]) -> int:
    """Adam's moments, and main weights where they are not the model's own storage."""
    mine = {p.untyped_storage().data_ptr() for c in chunks for p in c.parameters()}
    tensors = []
    for part in parts:
        for group in part.optimizer.param_groups:
            tensors += [p for p in group["params"] if p.untyped_storage().data_ptr() not in mine]
        for state in part.optimizer.state.values():
            tensors += [x for x in state.values() if x.dim() > 0]
    return _unique_bytes(tensors)
