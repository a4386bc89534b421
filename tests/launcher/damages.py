"""What is broken on purpose before a run, so that an error can be seen to name it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

import megatron_magi
from megatron_magi.adapter import core_attention, cpu, plugin, state_layers
from megatron_magi.adapter.monkeypatch import Swap, replace_everywhere
from megatron_magi.adapter.pipeline_agreement import open_pipeline_agreement
from megatron_magi.launcher import (
    documents,
    hook_points,
    model_hooks,
    session,
    step_balance,
)


def leave_batches_to_megatron() -> None:
    """The batch hook is bypassed: rows are shared out as Megatron does it."""
    hook_points.HOOK_POINTS = tuple(
        dataclasses.replace(point, wrap=lambda original, launch: original)
        if point.name == "batch"
        else point
        for point in hook_points.HOOK_POINTS
    )


def graphs_hold_attention() -> None:
    """The launcher does what it does for a job whose CUDA graphs hold attention; there are none."""
    for module in (session, core_attention, plugin, state_layers):
        module.captures_attention = lambda settings: True


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


def lose_cu_seqlens() -> None:
    """A data loader of the user's own brings samples without boundaries."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    original = GPTDataset.__getitem__

    def without(self: Any, index: int) -> Any:
        return {name: x for name, x in original(self, index).items() if "seqlen" not in name}

    GPTDataset.__getitem__ = without


def plan_otherwise_on_middle_stages() -> None:
    """Stages that read no rows cut the sequence in two documents."""
    bounds = model_hooks.sequence_bounds
    model_hooks.sequence_bounds = lambda sequences: [0, 7, bounds(sequences)[-1]]


def keep_samples_on_rank_0() -> None:
    """One replica takes Megatron's samples, while the others take dealt ones."""
    dealt = step_balance.deal_step

    def kept(costs: Any, replicas: int, micro: int, **kinds: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            return step_balance.order_of_megatron(len(costs), replicas, micro)
        return dealt(costs, replicas, micro, **kinds)

    step_balance.deal_step = kept


def run_every_step_twice() -> None:
    """Megatron's check of reproducibility replays the samples of every step. Its flag for it has a
    value that no Megatron of ours accepts."""
    from megatron.core import rerun_state_machine as machine

    original = machine.initialize_rerun_state_machine
    mode = machine.RerunMode.REPORT_DETERMINISM_STATS
    replace_everywhere(Swap(original, lambda **given: original(**{**given, "mode": mode})))


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


STORE_CALLS = ("set", "get", "wait", "add", "check", "compare_set")
GROUP_CALLS = ("allreduce", "broadcast", "allgather", "gather", "scatter", "reduce", "barrier")
GROUP_CALLS += ("alltoall", "alltoall_base", "send", "recv", "_allgather_base", "reduce_scatter")


def forbid_our_communication_in_the_build() -> None:
    """Store and group calls of the package's own code raise while the model is built; Megatron's
    pass."""
    from megatron.training import training

    building: list[bool] = []
    c10d = torch._C._distributed_c10d

    def guarded(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if building and _called_by_the_package():
                raise AssertionError(f"{original.__name__} was called while Megatron builds")
            return original(*args, **kwargs)

        return call

    for kinds, names in (
        ((c10d.Store, c10d.TCPStore, c10d.PrefixStore), STORE_CALLS),
        ((c10d.ProcessGroup, c10d.Backend, c10d.ProcessGroupGloo), (*GROUP_CALLS, "__init__")),
    ):
        for kind in kinds:
            for name in names:
                if name in vars(kind):
                    setattr(kind, name, guarded(getattr(kind, name)))

    original = training.setup_model_and_optimizer

    def setup(*args: Any, **kwargs: Any) -> Any:
        building.append(True)
        try:
            return original(*args, **kwargs)
        finally:
            building.pop()

    training.setup_model_and_optimizer = setup


def _called_by_the_package() -> bool:
    """Returns True if the nearest caller outside torch, and outside the stand-ins for torch.cuda
    that pass Megatron's calls on, is a file of megatron_magi."""
    frame = sys._getframe(2)
    torch_folder, package = (str(Path(m.__file__).parent) for m in (torch, megatron_magi))
    passed = (torch_folder, cpu.__file__)
    while frame is not None and frame.f_code.co_filename.startswith(passed):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename.startswith(package)


def communicate_in_the_build() -> None:
    """The package opens its groups with the first model chunk; the guard must see it."""
    forbid_our_communication_in_the_build()
    prepare = model_hooks.prepare_model

    def opening(model: Any, config: Any) -> None:
        prepare(model, config)
        open_pipeline_agreement(config.agreement_timeout_s)

    opening.__code__ = opening.__code__.replace(co_filename=model_hooks.__file__)
    model_hooks.prepare_model = opening
