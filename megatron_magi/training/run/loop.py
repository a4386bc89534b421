"""The training loop: steps, validation, checkpoints, and a regular end after a signal."""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_magi.compare.steps_file import StepRecord
from megatron_magi.training.checkpoint.checkpoint import (
    TrainingState,
    parameters_gathered,
    resume,
    save,
)
from megatron_magi.training.checkpoint.checkpoint_folder import checkpoint_folder
from megatron_magi.training.data.corpus import packed_sha256
from megatron_magi.training.data.packed_samples import PackedDataset
from megatron_magi.training.estimate.flops import peak_tflops, step_flops
from megatron_magi.training.process.folder_lock import locked_folders
from megatron_magi.training.process.rank_0 import from_rank_0
from megatron_magi.training.process.stop import StopRequest
from megatron_magi.training.recipe.config_checks import data_parallel_size
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.run.gradients import GradientDump
from megatron_magi.training.run.log import RunLog
from megatron_magi.training.run.microbatch import microbatch_streams
from megatron_magi.training.run.model import build_model, build_optimizer, transformer_config
from megatron_magi.training.run.overwrite import check_overwrite
from megatron_magi.training.run.step import BatchSums, StepSchedule, TrainingStopped
from megatron_magi.training.run.validation import Validation


def train(config: RunConfig) -> list[StepRecord]:
    """Train inside `process_groups`; every rank returns the same records of this start's steps.

    SIGTERM or SIGINT ends training after a step, with a checkpoint.

    Raises:
        RecipeError: data, validation or a checkpoint do not fit, another process runs in its
            folders, or the run would replace the numbers of another.
        TrainingStopped: a loss or gradient norm is not finite; nothing is saved then.
    """
    data_parallel_size(config, dist.get_world_size())
    with contextlib.ExitStack() as held:
        folders = locked_folders([config.folder, checkpoint_folder(config)])
        from_rank_0(lambda: held.enter_context(folders))
        return _train(config)


def _train(config: RunConfig) -> list[StepRecord]:
    """`train`, in folders that no other run writes to."""
    from_rank_0(lambda: check_overwrite(config))
    device = rank_device()
    model_config = transformer_config(config)
    chunks = build_model(config, model_config)
    state = TrainingState(chunks, *build_optimizer(config, chunks))
    state.data_sha256 = packed_sha256(config.data.path)
    news = resume(state, config)
    dataset = PackedDataset(
        config.data,
        config.train.seed,
        config.validation.fraction,
        vocab_size=config.model.vocab_size,
    )
    streams = microbatch_streams(dataset, config, model_config, device, state.consumed_samples)
    schedule = StepSchedule(config, model_config, chunks, device)
    validates = config.validation.interval is not None
    validation = Validation(config, model_config, device) if validates else None
    records = []
    with RunLog(config, dist.get_rank() == 0, state.iteration) as log, StopRequest() as stop:
        log.header(dataset, dist.get_world_size(), news)
        gradients = GradientDump.start(config, state.iteration)
        while state.iteration < config.train.iterations:
            begin = time.perf_counter()
            sums = train_step(schedule, streams, dataset, state, gradients)
            record, signal_number = _finish_step(config, state, sums, begin, stop)
            if validation and _is_due(config.validation.interval, state.iteration, config):
                with parameters_gathered(chunks, config):
                    loss = validation.loss(schedule, chunks, state.iteration)
                record = replace(record, validation_loss=loss)
            records.append(record)
            log.step(record)
            if signal_number or _is_due(config.checkpoint.interval, state.iteration, config):
                log.saved(save(state, config), state.iteration)
            if signal_number:
                log.stopped(signal.Signals(signal_number).name, state.iteration)
                break
    return records


def rank_device() -> torch.device:
    """The device of this rank: the CPU, or its GPU by number, since threads may have another."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def train_step(
    schedule: StepSchedule,
    streams: list[Any],
    dataset: PackedDataset,
    state: TrainingState,
    gradients: GradientDump | None = None,
) -> tuple[BatchSums, float, float]:
    """Forward, backward and update: sums of the batch, gradient norm, learning rate.

    The loss is read after the update, so that the host does not wait for a GPU before it needs the
    gradient norm. A loss or norm that is not finite ends the run, and nothing is saved then.
    """
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    iteration = state.iteration + 1
    step_sums = schedule(streams)
    if gradients is not None:
        gradients.write_if_due(state.chunks, iteration)
    groups = state.optimizer.param_groups
    learning_rate = float(next(group["lr"] for group in groups if group["params"]))
    _, grad_norm, _ = state.optimizer.step()
    sums = step_sums.read(dataset, iteration)
    _check_grad_norm(grad_norm, iteration, sums)
    state.scheduler.step(1)
    return sums, float(grad_norm), learning_rate


def _finish_step(
    config: RunConfig,
    state: TrainingState,
    results: tuple[BatchSums, float, float],
    begin: float,
    stop: StopRequest,
) -> tuple[StepRecord, int]:
    """Count the step; return its record and the signal that any rank got (0: none), on all."""
    sums, grad_norm, learning_rate = results
    memory, signal_number = _largest(_memory_bytes(), stop.signal_number)
    seconds = time.perf_counter() - begin
    state.iteration += 1
    state.consumed_samples += config.train.global_batch_size
    tokens = config.train.global_batch_size * config.data.seq_length
    num_processes = dist.get_world_size()
    tflops = step_flops(config.model, tokens, int(sums.area)) / (seconds * num_processes * 1e12)
    peak = peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    record = StepRecord(
        iteration=state.iteration,
        lm_loss=sums.mean_loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        loss_tokens=int(sums.loss_tokens),
        consumed_samples=state.consumed_samples,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        tflops_per_rank=tflops,
        mfu=None if peak is None else tflops / peak,
        memory_gib=memory / 2**30,
        cp_imbalance=sums.imbalance / sums.microbatches,
        num_processes=num_processes,
    )
    return record, int(signal_number)


def _largest(*values: int) -> list[float]:
    """Each value's maximum over the ranks; one rank alone does not wait for its GPU."""
    if dist.get_world_size() == 1:
        return [float(value) for value in values]
    facts = torch.tensor(values, dtype=torch.float64)
    facts = facts.cuda() if torch.cuda.is_available() else facts
    dist.all_reduce(facts, op=dist.ReduceOp.MAX)
    return facts.tolist()


def _is_due(interval: int | None, iteration: int, config: RunConfig) -> bool:
    """Whether `iteration` is one of every `interval`, or the last; None: never."""
    if interval is None:
        return False
    return iteration % interval == 0 or iteration == config.train.iterations


def _check_grad_norm(grad_norm: Any, iteration: int, sums: BatchSums) -> None:
    if grad_norm is not None and not math.isfinite(float(grad_norm)):
        raise TrainingStopped(
            f"the gradient norm must be finite, got {float(grad_norm)} at iteration {iteration} "
            f"with a finite loss {sums.mean_loss:.6f}; lower optimizer.lr, or try "
            f"train.dtype=fp32"
        )


def _memory_bytes() -> int:
    """Peak memory: of the CUDA allocator, or resident on the CPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
