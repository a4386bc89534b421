"""Runs one global batch through Megatron's schedule, and sums its results over the world."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from megatron_magi.adapter.loss import per_token_loss
from megatron_magi.adapter.model_chunks import model_chunks
from megatron_magi.adapter.packed import pipeline_seq_length
from megatron_magi.adapter.pipeline_agreement import finish_pipeline_agreement
from megatron_magi.core.cuda.tables import upload
from megatron_magi.training.data.packed_samples import PackedDataset
from megatron_magi.training.recipe.config_checks import data_parallel_size
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.run.microbatch import Microbatch


class TrainingStopped(RuntimeError):
    """A run that must not continue; the message is the same on every rank."""


class StepSchedule:
    """Megatron's schedule of a run, for training and for validation."""

    def __init__(
        self,
        config: RunConfig,
        model_config: TransformerConfig,
        chunks: list[Any],
        device: torch.device,
    ) -> None:
        self.device = device
        self.run = partial(
            get_forward_backward_func(),
            forward_step_func=partial(_forward_step, device=device),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=config.train.global_batch_size
            // data_parallel_size(config, dist.get_world_size()),
            seq_length=config.data.seq_length
            if config.attention != "magi"
            else pipeline_seq_length(config.data.seq_length, model_config, config.magi),
            micro_batch_size=1,
        )

    def __call__(
        self,
        streams: list[Iterator[Microbatch]],
        train: bool = True,
    ) -> StepSums:
        """One global batch, forward and (if `train`) backward; the host does not wait for a GPU.

        Raises:
            AgreementError: ranks planned different things.
        """
        iterator = streams if len(streams) > 1 else streams[0]
        reports = self.run(data_iterator=iterator, forward_only=not train)
        finish_pipeline_agreement()
        return StepSums.start(reports, self.device)


@dataclass(frozen=True)
class BatchSums:
    """The sums of a global batch over the world, equal on every rank."""

    loss_sum: float
    """Sum of the losses of counted tokens, nats."""
    loss_tokens: float
    """Tokens whose loss counts."""
    area: float
    """Visible cells of the attention masks."""
    imbalance: float
    """The largest load of a context-parallel rank over the mean, summed over microbatches."""
    microbatches: float

    @property
    def mean_loss(self) -> float:
        """Mean loss of a counted token; 0 if none counts."""
        return self.loss_sum / max(self.loss_tokens, 1.0)


@dataclass
class StepSums:
    """A global batch's sums before they are on the host: the fields of `BatchSums`, in order."""

    host: torch.Tensor
    ready: torch.cuda.Event | None
    reports: list[dict[str, Any]]

    @classmethod
    def start(cls, reports: list[dict[str, Any]], device: torch.device) -> StepSums:
        """Add up over the world; every rank calls it."""
        sums = _sums_of_rank(reports, device)
        dist.all_reduce(sums)
        if device.type != "cuda":
            return cls(sums, None, reports)
        host = torch.empty_like(sums, device="cpu", pin_memory=True)
        host.copy_(sums, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return cls(host, ready, reports)

    def read(self, dataset: PackedDataset, iteration: int) -> BatchSums:
        """The sums, as soon as the device has them.

        Raises:
            TrainingStopped: a loss is not finite; on every rank.
        """
        if self.ready is not None:
            self.ready.synchronize()
        sums = BatchSums(*self.host.tolist())
        if not math.isfinite(sums.loss_sum):
            _stop_at_bad_loss(self.reports, iteration, dataset)
        return sums


def _forward_step(
    stream: Iterator[Microbatch], chunk: Any, device: torch.device
) -> tuple[torch.Tensor, Any]:
    """Megatron's forward step: one microbatch through one model chunk, with its loss function."""
    microbatch = next(stream)
    (gpt,) = model_chunks(chunk)
    local = microbatch.local(
        gpt.pre_process or gpt.post_process, device, parallel_state.get_context_parallel_group()
    )
    return chunk(**local.model_inputs()), partial(_loss, microbatch, local.loss_mask)


def _loss(microbatch: Microbatch, loss_mask: torch.Tensor | None, output: torch.Tensor) -> Any:
    assert loss_mask is not None, "the last pipeline stage has a loss mask"
    loss, num_tokens, report = per_token_loss(loss_mask, output)
    return loss, num_tokens, {**report, "microbatch": microbatch}


def _sums_of_rank(reports: list[dict[str, Any]], device: torch.device) -> torch.Tensor:
    """float64 [5] of this rank: the fields of `BatchSums`, in their order.

    Only the last pipeline stage has reports. Losses are per context-parallel rank; the rest is
    equal on all of them and counted once.
    """
    facts = torch.zeros(5, dtype=torch.float64)
    if parallel_state.get_tensor_model_parallel_rank() or not reports:
        return facts.to(device)
    if parallel_state.get_context_parallel_rank() == 0:
        found = [(m.area, m.imbalance, 1) for m in (r["microbatch"] for r in reports)]
        facts[2:] = torch.tensor(found, dtype=torch.float64).sum(0)
    sums = upload(facts, device)
    sums[:2] = torch.stack([report["lm loss"] for report in reports]).double().sum(0)
    return sums


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
