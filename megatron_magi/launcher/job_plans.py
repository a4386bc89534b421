"""Plans of a job's microbatches, made in one process before the job runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_magi.adapter.document_plans import document_plans
from megatron_magi.adapter.model_shape import head_shape, window_layers
from megatron_magi.core.plan import AttnPlan
from megatron_magi.launcher.documents import (
    MaskRequest,
    checked_masks,
    has_documents,
    sequence_bounds,
)
from megatron_magi.launcher.file_samples import FileSamples, open_index
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.job_sizes import ModelSizes, dtype_of

MAX_MICROBATCHES = 4
FLOPS_OF_A_CELL = 12
"""Of one query head and one channel: two products of 2 in the forward, twice that in the
backward."""

NO_TOKENIZER = SimpleNamespace(vocab_size=1, eod=0)
"""For lengths alone."""

Bounds = npt.NDArray[np.int64]


class UnknownMask(Exception):
    """The masks of this job cannot be computed before it runs; one line that says why."""


@dataclass(frozen=True)
class JobPlans:
    """Plans of some microbatches of a job."""

    documents: str
    """Where the documents of these microbatches come from."""
    plans: Sequence[AttnPlan]
    """One for each microbatch and kind of layer."""
    tokens: int
    """Tokens of one microbatch."""
    flops: float
    """Attention FLOPs of a mean global batch, forward and backward, without recomputation."""
    causal_share: float
    """Visible cells over those of one causal document in each sample, in the layers' mean."""


def plan_job(args: Any, options: LauncherOptions) -> JobPlans:
    """Plan microbatches like the first ones of a job.

    Args:
        args: Megatron's arguments after `validate_args`.
        options: those of the flag.

    Raises:
        UnknownMask: documents or masks depend on data that is not read here.
        ValueError, NotImplementedError: as the planner.
    """
    count = min(MAX_MICROBATCHES, _microbatches(args))
    documents, batches = _batches(args, count)
    sizes = ModelSizes(args, dtype_of(args))
    windows = window_layers(sizes)
    plans, cells = [], 0
    for bounds in batches:
        mask = _mask(options, bounds)
        full, window = document_plans(
            bounds, sizes, args.context_parallel_size, options.config, mask
        )
        for plan, layers in ((full, len(windows) - sum(windows)), (window, sum(windows))):
            if plan is not None:
                plans.append(plan)
                cells += plan.mask.area() * layers
    length, samples = args.seq_length, len(batches) * args.micro_batch_size
    causal = samples * len(windows) * length * (length + 1) // 2
    return JobPlans(
        documents, plans, length * args.micro_batch_size,
        flops=_flops_of_cells(sizes, cells) * args.global_batch_size / samples,
        causal_share=cells / causal,
    )  # fmt: skip


def _microbatches(args: Any) -> int:
    """Microbatches of all replicas in one step."""
    return max(1, int(args.global_batch_size or args.micro_batch_size) // args.micro_batch_size)


def _flops_of_cells(sizes: Any, cells: int) -> float:
    heads = head_shape(sizes)
    width = (heads.head_dim + heads.value_dim) / 2
    ranks = sizes.tensor_model_parallel_size
    return float(FLOPS_OF_A_CELL * cells * heads.num_heads_q * ranks * width)


def _batches(args: Any, count: int) -> tuple[str, list[Bounds]]:
    if getattr(args, "sft", False):
        raise UnknownMask("the conversations of --sft are known when they are tokenised")
    whole = np.array(sequence_bounds((args.micro_batch_size, args.seq_length)))
    if not has_documents(args):
        return "each sample is one document", [whole]
    source, file = _data(args)
    if file is None:
        return f"{source}; each sample as one document", [whole]
    try:
        samples = FileSamples(file, args.seq_length, seed=args.seed)
    except ValueError as error:
        raise UnknownMask(str(error)) from error
    return source, [*_joined(samples, args.micro_batch_size, count)]


def _data(args: Any) -> tuple[str, Any]:
    """(where documents come from, the data set that has their lengths or None)."""
    if getattr(args, "mock_data", False):
        from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

        return "documents of Megatron's mock data", MockGPTLowLevelDataset(NO_TOKENIZER)
    words = getattr(args, "data_path", None) or getattr(args, "train_data_path", None) or ()
    prefix = next((word for word in words if Path(f"{word}.idx").is_file()), None)
    if prefix is None:
        return "its data is not here", None
    return f"documents of {prefix}, shuffled", open_index(prefix)


def _joined(samples: FileSamples, micro_batch_size: int, count: int) -> Iterator[Bounds]:
    """Boundaries of microbatches whose samples are joined to one stream."""
    for first in range(0, count * micro_batch_size, micro_batch_size):
        parts = [
            samples.boundaries(first + i)[1:] + i * samples.seq_length
            for i in range(micro_batch_size)
        ]
        yield np.concatenate([[0], *parts]).astype(np.int64)


def _mask(options: LauncherOptions, bounds: Bounds) -> Any:
    """The mask of --magi-mask without a batch, or "causal"."""
    function = options.mask_function()
    if function is None:
        return "causal"
    try:
        return checked_masks(function(MaskRequest(tuple(map(int, bounds)), None)))
    except Exception as error:  # a function of the user may raise anything
        raise UnknownMask(
            f"the function of --magi-mask makes no mask without a batch "
            f"({type(error).__name__}: {error})"
        ) from error
