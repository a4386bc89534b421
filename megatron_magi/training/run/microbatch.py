"""Prepares a packed sample for the model: mask and plan in advance, this rank's rows later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, tee
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from megatron_magi.adapter.packed import MagiPackedSeqParams, make_packed_seq_params
from megatron_magi.adapter.rank_batch import Batch, LocalBatch, batch_id_of, dispatch_batch
from megatron_magi.core.cuda.tables import upload
from megatron_magi.core.mask.mask import AttnMask
from megatron_magi.training.data.packed_samples import (
    PackedDataset,
    PackedSample,
    document_numbers,
    mask_of_documents,
    microbatch_indices,
    prefetch,
)
from megatron_magi.training.estimate.pack_cost import sample_order
from megatron_magi.training.recipe.run_config import RunConfig

ROWS = ("tokens", "labels", "loss_mask")
"""The fields of a sample that have one row per token."""


@dataclass
class Microbatch:
    """A sample with its plan, in global order and on the CPU."""

    sample: PackedSample
    batch: Batch
    area: int
    """Number of visible cells."""
    packed: MagiPackedSeqParams | None
    """Plan and positions; None for the dense baseline."""
    baseline_mask: torch.Tensor | None
    """Megatron's attention_mask of a baseline (see `_baseline_mask`); None for ours."""

    @property
    def imbalance(self) -> float:
        """The largest load of a context-parallel rank over the mean."""
        return 1.0 if self.packed is None else self.packed.token_plan.imbalance

    def local(self, needs_rows: bool, device: torch.device, cp_group: Any) -> LocalBatch:
        """This rank's rows on `device`; every rank calls it, also one that needs no rows."""
        batch = None
        if needs_rows:
            given = vars(self.batch).items()
            batch = Batch(**{name: upload(x, device) for name, x in given if x is not None})
        if self.packed is None:
            assert self.baseline_mask is not None, "a baseline has a mask"
            return LocalBatch(batch, None, attention_mask=self.baseline_mask.to(device))
        tokens = self.batch.tokens
        batch_id = None if tokens is None else batch_id_of(tokens)
        return dispatch_batch(batch, self.packed, cp_group, batch_id=batch_id)


def microbatch_streams(
    dataset: PackedDataset,
    config: RunConfig,
    model_config: TransformerConfig,
    device: torch.device,
    first_sample: int = 0,
    num_batches: int | None = None,
) -> list[Iterator[Microbatch]]:
    """One stream of this replica's microbatches per model chunk.

    Args:
        first_sample: number of the first global batch's first sample.
        num_batches: number of global batches in the stream. None: endless.
    """
    cp_group = parallel_state.get_context_parallel_group()
    batch, dp = config.train.global_batch_size, parallel_state.get_data_parallel_world_size()
    sample_at = sample_order(dataset, config, dp, first_sample)

    def make(place: int) -> Microbatch:
        return _make(dataset[sample_at(place)], config, model_config, cp_group, device)

    places = microbatch_indices(
        batch,
        parallel_state.get_data_parallel_rank(),
        dp,
        first_sample,
        is_reversed=config.data.step_order == "reversed",
    )
    if num_batches is not None:
        places = islice(places, num_batches * batch // dp)
    stream = prefetch(make, places, config.data.prefetch)
    return list(tee(stream, config.parallel.vpp or 1))


def _make(
    sample: PackedSample,
    config: RunConfig,
    model_config: TransformerConfig,
    cp_group: Any,
    device: torch.device,
) -> Microbatch:
    mask = mask_of_documents(sample.cu_seqlens, config.data)
    rows = {name: torch.from_numpy(getattr(sample, name))[None] for name in ROWS}
    if device.type == "cuda":
        rows = {name: x.pin_memory() for name, x in rows.items()}
    batch = Batch(**rows)
    packed = baseline_mask = None
    if config.attention != "magi":
        baseline_mask = _baseline_mask(sample, mask, config)
    else:
        is_stream = config.data.mask != "document"
        packed = make_packed_seq_params(
            [0, len(sample.tokens)] if is_stream else sample.cu_seqlens,
            model_config,
            cp_group,
            magi_config=config.magi,
            mask=mask,
            device=device,
        )
    return Microbatch(sample, batch, mask.area(), packed, baseline_mask)


def _baseline_mask(sample: PackedSample, mask: AttnMask, config: RunConfig) -> torch.Tensor:
    """bool [1, 1, T, T] of hidden cells for "dense"; int32 [T] document numbers for the others."""
    if config.attention == "dense":
        return ~torch.from_numpy(mask.to_dense())[None, None]
    return torch.from_numpy(document_numbers(sample, config.data))
