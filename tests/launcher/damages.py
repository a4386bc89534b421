"""What is broken on purpose before a run, so that an error can be seen to name it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron_magi.adapter.replace import replace_everywhere
from megatron_magi.launcher import documents, hook_points, model_hooks


def leave_batches_to_megatron() -> None:
    """The batch hook is bypassed: rows are shared out as Megatron does it."""
    hook_points.HOOK_POINTS = tuple(
        dataclasses.replace(point, wrap=lambda original, launch: original)
        if point.name == "batch"
        else point
        for point in hook_points.HOOK_POINTS
    )


def forget_to_attach() -> None:
    """Models are built from our spec, and not prepared."""
    model_hooks.prepare_model = lambda *args: None  # type: ignore[assignment]


def move_a_boundary_on_rank_1() -> None:
    """One rank sees the first document end a token later."""
    bounds = documents.bounds_of_cu_seqlens

    def moved(*args: Any) -> list[int]:
        found = bounds(*args)
        if torch.distributed.get_rank() != 1 or len(found) < 3:
            return found
        return [found[0], found[1] + 1, *found[2:]]

    documents.bounds_of_cu_seqlens = moved


def skip_a_sample_on_rank_1() -> None:
    """One rank is a batch ahead; all sequences have one length, so that plans are equal."""
    from megatron.core import rerun_state_machine as machine

    original = machine.RerunDataIterator.__next__
    seen: list[Any] = []

    def ahead(self: Any) -> Any:
        if not seen and torch.distributed.get_rank() == 1:
            seen.append(original(self))
        return original(self)

    machine.RerunDataIterator.__next__ = ahead


def plan_otherwise_on_middle_stages() -> None:
    """Stages that read no rows cut the sequence in two documents."""
    bounds = model_hooks.sequence_bounds
    model_hooks.sequence_bounds = lambda sequences: [0, 7, bounds(sequences)[-1]]


def run_every_step_twice() -> None:
    """Megatron's check of reproducibility replays the samples of every step. Its flag for it has a
    value that no Megatron of ours accepts."""
    from megatron.core import rerun_state_machine as machine

    original = machine.initialize_rerun_state_machine
    mode = machine.RerunMode.REPORT_DETERMINISM_STATS
    replace_everywhere(original, lambda **given: original(**{**given, "mode": mode}))


def validate_as_sft_does() -> None:
    """Under --sft, validation takes the mean of what ranks report, each divided by its count."""
    from megatron.training import get_args, training

    original = training.evaluate

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        get_args().sft = True
        try:
            return original(*args, **kwargs)
        finally:
            get_args().sft = False

    training.evaluate = evaluate
