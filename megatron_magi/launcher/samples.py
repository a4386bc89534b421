"""Reads the documents of samples on the host, and draws samples ahead.

The documents of a sample are read here, before Megatron moves it to the device. No rank waits for
the device to know them, and every pipeline stage knows them, also one that reads no rows.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator

from megatron_magi.launcher.documents import missing_documents
from megatron_magi.launcher.sample_prefetch import NUM_AHEAD, DrawnAhead
from megatron_magi.launcher.session import LauncherState, hook

ONE_THREAD = 32_768
"""Elements up to which PyTorch's CPU operations use one thread. Waking 64 of them for one longer
mask took 80 to 99 ms of a step on a host with 64 cores and four ranks that had no OMP_NUM_THREADS,
which torchrun sets to 1 (record te_steps_threads_h200_2026-11-28)."""


@hook
def wrap_dataset_builder(
    launch: LauncherState, original: Any, self: Any, *args: Any, **kwargs: Any
) -> None:
    """For `BlendedMegatronDatasetBuilder.__init__`: with documents, every pipeline stage has data.

    Megatron builds it on middle stages for --sft only, although its get_batch asks for samples
    there under --dataloader-inter-document-masking too.
    """
    given = inspect.signature(original).bind(self, *args, **kwargs)
    if launch.has_documents():
        of_megatron = given.arguments["is_built_on_rank"]
        given.arguments["is_built_on_rank"] = lambda: (
            parallel_state.get_tensor_model_parallel_rank() == 0 or of_megatron()
        )
    original(*given.args, **given.kwargs)


@hook
def wrap_next_sample(launch: LauncherState, original: Any, self: Any) -> Any:
    """For `RerunDataIterator.__next__`: notes which sample it is and its documents, and draws
    samples ahead.

    Samples are drawn ahead below this iterator, so that it keeps and replays those of its own step.
    """
    if launch.sequences is None:
        return original(self)
    sample = _drawn(launch, original, self) if launch.has_documents() else original(self)
    launch.microbatch.identify(sample)
    _note_labels(launch, sample)
    return sample


def _note_labels(launch: LauncherState, sample: Any) -> None:
    """Keep whether a token of this step counts; a step without any logs no loss."""
    mask = sample.get("loss_mask") if isinstance(sample, dict) else None
    if isinstance(mask, torch.Tensor) and mask.device.type == "cpu" and not launch.stats.has_label:
        launch.stats.has_label = any(x.any() for x in mask.flatten().split(ONE_THREAD))


def _drawn(launch: LauncherState, original: Any, self: Any) -> Any:
    _draw_ahead(launch, self)
    sample = original(self)
    launch.microbatch.see(sample)
    return sample


def _draw_ahead(launch: LauncherState, iterator: Any) -> DrawnAhead:
    """The iterator below Megatron's, made one that can look ahead."""
    if not isinstance(iterator.iterable, DrawnAhead):
        ahead = launch.plans_ahead()
        see, depth = (launch.microbatch.see_ahead, NUM_AHEAD) if ahead else (lambda sample: None, 0)
        iterator.iterable = DrawnAhead(iterator.iterable, see, depth)
    found: DrawnAhead = iterator.iterable
    return found


def require_documents(launch: LauncherState, iterators: Any) -> None:
    """Check, before the first step, that the first sample brings the cu_seqlens that Megatron's
    arguments promise; all ranks call it, also those that have no samples.

    Args:
        iterators: the schedule's data_iterator: one, a list for virtual stages, or None.

    Raises:
        ValueError: on every rank, if a rank's sample has none.

    Cost: an all-reduce of one number over the job.
    """
    if not launch.expects_cu_seqlens():
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lacking = any(launch.lacks_documents(sample) for sample in peek_samples(launch, iterators))
    missing = torch.tensor([lacking], device=device).int()
    if dist.is_initialized():
        dist.all_reduce(missing, op=dist.ReduceOp.MAX)
    if missing.item():
        raise missing_documents()


def peek_samples(launch: LauncherState, iterators: Any) -> list[Any]:
    """The sample that each iterator of a schedule gives next.

    Args:
        iterators: one, a list for virtual stages, or None.
    """
    each = iterators if isinstance(iterators, list) else [iterators]
    return [_draw_ahead(launch, x).peek() for x in each if isinstance(x, RerunDataIterator)]
