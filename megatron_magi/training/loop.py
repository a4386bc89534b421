"""The training loop: Megatron's schedule, optimizer and groups, our batches; CPU and GPU alike."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from megatron_magi.adapter.loss import per_token_loss
from megatron_magi.adapter.packed import pipeline_seq_length
from megatron_magi.training.config import RunConfig, data_parallel_size
from megatron_magi.training.data import PackedDataset
from megatron_magi.training.flops import step_flops
from megatron_magi.training.log import RunLog, StepRecord
from megatron_magi.training.microbatch import Microbatch, microbatch_streams
from megatron_magi.training.model import build_model, transformer_config, unwrap
from megatron_magi.training.optimizer import build_optimizer


class TrainingStopped(RuntimeError):
    """A run that must not go on; the same message on every rank."""


def train(config: RunConfig) -> list[StepRecord]:
    """Train inside `process_groups`; every rank returns the same records.

    Raises:
        TrainingStopped: at a loss or gradient norm that is not finite, before the optimizer step.
    """
    dp = data_parallel_size(config, dist.get_world_size())
    device = torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else torch.device("cpu")
    model_config = transformer_config(config)
    chunks = build_model(config, model_config)
    optimizer, scheduler = build_optimizer(config, chunks)
    dataset, streams = microbatch_streams(config, model_config, device)
    schedule = partial(
        get_forward_backward_func(),
        forward_step_func=partial(_forward_step, device=device),
        data_iterator=streams if len(chunks) > 1 else streams[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=config.train.global_batch_size // dp,
        seq_length=_pipeline_seq_length(config, model_config),
        micro_batch_size=1,
        forward_only=False,
    )
    records = []
    with RunLog(config, is_writer=dist.get_rank() == 0) as log:
        log.header(dataset, dist.get_world_size())
        for iteration in range(1, config.train.iterations + 1):
            begin = time.perf_counter()
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            sums = _reduce_reports(schedule(), iteration, dataset)
            learning_rate = _learning_rate(optimizer)
            _, grad_norm, _ = optimizer.step()
            _check_grad_norm(grad_norm, iteration, sums)
            scheduler.step(1)
            records.append(_record(config, iteration, sums, grad_norm, learning_rate, begin))
            log.step(records[-1])
    return records


def _pipeline_seq_length(config: RunConfig, model_config: TransformerConfig) -> int:
    if config.attention == "dense":
        return config.data.seq_length
    return pipeline_seq_length(config.data.seq_length, model_config, config.magi)


def _on_gpu() -> bool:
    return torch.cuda.is_available()


def _forward_step(
    stream: Iterator[Microbatch], chunk: Any, device: torch.device
) -> tuple[torch.Tensor, Any]:
    """Megatron's forward step: one microbatch through one model chunk, and how to take its loss."""
    microbatch = next(stream)
    gpt = unwrap(chunk)
    local = microbatch.local(
        gpt.pre_process or gpt.post_process, device, parallel_state.get_context_parallel_group()
    )
    return chunk(**local.model_inputs()), partial(_loss, microbatch, local.loss_mask)


def _loss(microbatch: Microbatch, loss_mask: torch.Tensor | None, output: torch.Tensor) -> Any:
    assert loss_mask is not None, "the last pipeline stage has a loss mask"
    loss, num_tokens, report = per_token_loss(loss_mask, output)
    return loss, num_tokens, {**report, "microbatch": microbatch}


def _reduce_reports(
    reports: list[dict[str, Any]], iteration: int, dataset: PackedDataset
) -> torch.Tensor:
    """float64 [5] over the world: loss sum, tokens, attention area, imbalance sum, microbatches.

    Only the last pipeline stage has reports. Losses are per context-parallel rank; the rest is
    known alike on all of them and counted once.
    """
    device = reports[0]["lm loss"].device if reports else None
    sums = torch.zeros(5, dtype=torch.float64, device=device or _device())
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for report in reports:
            sums[:2] += report["lm loss"].double()
            if parallel_state.get_context_parallel_rank() == 0:
                microbatch = report["microbatch"]
                facts = [microbatch.area, microbatch.imbalance, 1]
                sums[2:] += torch.tensor(facts, dtype=torch.float64, device=sums.device)
    dist.all_reduce(sums)
    if not math.isfinite(float(sums[0])):
        _stop_at_bad_loss(reports, iteration, dataset)
    return sums.cpu()


def _device() -> Any:
    return torch.cuda.current_device() if _on_gpu() else "cpu"


def _stop_at_bad_loss(
    reports: list[dict[str, Any]], iteration: int, dataset: PackedDataset
) -> None:
    """Name, on every rank, the ranks and documents whose loss is not finite."""
    mine = [
        f"rank {dist.get_rank()}: sample {r['microbatch'].sample.index}, documents "
        + ", ".join(dataset.document_names(r["microbatch"].sample)[:8])
        for r in reports
        if not bool(torch.isfinite(r["lm loss"]).all())
    ]
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    where = "; ".join(line for lines in gathered for line in lines)
    raise TrainingStopped(
        f"the loss must be finite, got nan or inf at iteration {iteration} on {where}; look at "
        f"these documents, lower optimizer.lr, or lengthen optimizer.warmup_iters"
    )


def _check_grad_norm(grad_norm: Any, iteration: int, sums: torch.Tensor) -> None:
    if grad_norm is not None and not math.isfinite(float(grad_norm)):
        raise TrainingStopped(
            f"the gradient norm must be finite, got {float(grad_norm)} at iteration {iteration} "
            f"with a finite loss {float(sums[0] / sums[1]):.6f}; lower optimizer.lr, or try "
            f"train.dtype=fp32"
        )


def _learning_rate(optimizer: Any) -> float:
    return float(next(group["lr"] for group in optimizer.param_groups if group["params"]))


def _record(
    config: RunConfig,
    iteration: int,
    sums: torch.Tensor,
    grad_norm: Any,
    learning_rate: float,
    begin: float,
) -> StepRecord:
    loss_sum, loss_tokens, area, imbalance, microbatches = sums.tolist()
    memory = torch.tensor([_memory_bytes()], dtype=torch.float64, device=_device())
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    seconds = time.perf_counter() - begin
    tokens = config.train.global_batch_size * config.data.seq_length
    return StepRecord(
        iteration=iteration,
        lm_loss=loss_sum / max(loss_tokens, 1.0),
        grad_norm=float(grad_norm),
        learning_rate=learning_rate,
        loss_tokens=int(loss_tokens),
        consumed_samples=iteration * config.train.global_batch_size,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        tflops_per_rank=step_flops(config.model, tokens, int(area))
        / (seconds * dist.get_world_size() * 1e12),
        memory_gib=float(memory) / 2**30,
        cp_imbalance=imbalance / microbatches,
    )


def _memory_bytes() -> int:
    """Peak memory: of the CUDA allocator, or resident on the CPU."""
    if _on_gpu():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
