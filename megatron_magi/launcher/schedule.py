"""Megatron's schedules and steps: they take the plan's length, compare plans and log figures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_magi.adapter.pipeline_agreement import finish_pipeline_agreement
from megatron_magi.launcher.balance_agreement import agree_on_dealing
from megatron_magi.launcher.opening import begin
from megatron_magi.launcher.session import LauncherState, hook


@hook
def wrap_get_schedule(launch: LauncherState, original: Any, *args: Any, **kwargs: Any) -> Any:
    """For `get_forward_backward_func` as `megatron.training.training` sees it."""
    return functools.partial(_run, launch, original(*args, **kwargs))


def _run(launch: LauncherState, schedule: Callable[..., Any], **kwargs: Any) -> Any:
    """A schedule whose validation reports a whole microbatch under `--sft`: Megatron then takes the
    mean of the ranks' own means, and a plan gives ranks very different numbers of counted tokens,
    sometimes none."""
    reports = run_schedule(launch, schedule, **kwargs)
    is_validation = kwargs.get("forward_only") and not kwargs.get("collect_non_loss_data")
    cp_group = launch.cp_group() if is_validation else None
    if cp_group is not None and getattr(launch.args, "sft", False):
        return of_whole_microbatches(reports, cp_group)
    return reports


def run_schedule(launch: LauncherState, schedule: Callable[..., Any], **kwargs: Any) -> Any:
    """One schedule over all microbatches, for training or validation.

    Pipeline stages exchange the rows of one joined stream, padded as the plan pads it. After the
    last microbatch, and before the optimizer uses a gradient, all ranks of a model have planned the
    same, or all get an error.
    """
    if launch.model_config is None:
        raise SystemExit(
            "--attention-backend magi requires a GPTModel or HybridModel, got a script that built "
            "neither; run it without the flag"
        )
    begin(launch, kwargs["data_iterator"])
    agree_on_dealing(launch, kwargs["data_iterator"], not kwargs.get("forward_only"))
    kwargs["forward_step_func"] = counted_forward_step(launch, kwargs["forward_step_func"])
    length, count = kwargs["seq_length"], kwargs["micro_batch_size"]
    shape = launch.stream_shape(length, count, launch.model_config)
    kwargs["seq_length"], kwargs["micro_batch_size"] = shape
    if launch.captures_attention():
        return schedule(**kwargs)
    kwargs["decoder_seq_length"] = None
    launch.sequences = (count, length)
    try:
        result = schedule(**kwargs)
    finally:
        launch.sequences = None
    finish_pipeline_agreement()
    return result


def of_whole_microbatches(
    reports: list[dict[str, Tensor]], cp_group: dist.ProcessGroup
) -> list[dict[str, Tensor]]:
    """The reports with the sum and the count, [2], of all context-parallel ranks together.

    Cost: for each name an all-reduce of two numbers a microbatch.
    """
    for name in reports[0] if reports else ():
        sums = torch.stack([report[name].view(-1) for report in reports])
        if sums.shape[1] == 2:  # else a value without a count, of which Megatron takes the mean
            dist.all_reduce(sums, group=cp_group)
            reports = [{**each, name: row} for each, row in zip(reports, sums, strict=True)]
    return reports


def counted_forward_step(
    launch: LauncherState, forward_step: Callable[..., Any]
) -> Callable[..., Any]:
    """The forward step, which draws its sample of the iterator that it is given, with a loss
    function that must count its tokens.

    Per-token loss divides every gradient by the tokens of all ranks, and Megatron takes a missing
    count as 0. Gradients would then not be divided at all, without an error.
    """

    @functools.wraps(forward_step)
    def run(iterator: Any, *args: Any, **kwargs: Any) -> Any:
        launch.microbatch.begin(iterator)
        output, loss_function = forward_step(iterator, *args, **kwargs)
        return output, functools.partial(_counted, loss_function)

    return run


def _counted(loss_function: Callable[..., Any], output: Any, **kwargs: Any) -> Any:
    result = loss_function(output, **kwargs)
    if not kwargs and len(result) != 3:
        raise ValueError(
            f"with --attention-backend magi a loss function must return (sum of losses, number of "
            f"tokens, report), got {len(result)} values; return the sum and count, not the mean"
        )
    return result


@hook
def wrap_train_step(launch: LauncherState, original: Any, *args: Any, **kwargs: Any) -> Any:
    """For `train_step`: adds magi's figures to its losses, which Megatron logs by name."""
    launch.take_stats()
    losses, *rest = original(*args, **kwargs)
    if losses:
        _report_missing_labels(launch)
    if losses and not launch.captures_attention():
        device = next(iter(losses.values())).device
        means = launch.take_stats()
        figures = torch.tensor(list(means.values()), device=device)  # one copy for all
        losses = {**losses, **dict(zip(means, figures, strict=True))}
    return (losses, *rest)


def _report_missing_labels(launch: LauncherState) -> None:
    """Print one line per replica whose samples had no token that counts: Megatron logs no loss for
    a step without any."""
    if launch.stats.has_label is False and parallel_state.get_context_parallel_rank() == 0:
        rank = dist.get_rank() if dist.is_initialized() else 0
        print(
            f"megatron_magi: a step had no label in the samples of rank {rank}, whose loss_mask is "
            f"0 everywhere; if no replica has one, Megatron logs no loss; check the data",
            flush=True,
        )
