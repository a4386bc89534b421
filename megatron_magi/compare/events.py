"""Curves that a job wrote with Megatron's --tensorboard-dir."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_magi.compare.differences import RunCurves
from megatron_magi.compare.model_facts import ModelFacts, facts_of_arguments
from megatron_magi.compare.run_error import RunError


class Tag(NamedTuple):
    """The names of one curve in event files."""

    megatron: str
    """Of Megatron-LM and Megatron-Bridge."""
    nemo: str


LOSS = Tag("lm loss", "reduced_train_loss")
NORM = Tag("grad-norm", "grad_norm")
VALIDATION = Tag("lm loss validation", "val_loss")
BATCH = Tag("batch-size", "global_batch_size")
ARGUMENT = "{}/text_summary"
"""Tag of an argument of Megatron, logged as text at the start of a job."""


def event_folder(run: Path) -> Path | None:
    """The folder with the run's event files, at or below its own; None if there are none.

    Raises:
        RunError: several folders hold some.
    """
    found = sorted({path.parent for path in run.rglob("events.out.tfevents.*")})
    if len(found) > 1:
        raise RunError(
            f"a run must have one folder of TensorBoard events, got {found[0]} and {found[1]} in "
            f"{run}; name one of them"
        )
    return found[0] if found else None


def read_events(name: str, folder: Path) -> tuple[RunCurves, ModelFacts | None]:
    """The curves in a folder of event files, and facts of the arguments that Megatron logged.

    A run that resumed has written some iterations twice: the last value counts. A step's time is
    the time since the step before was written, with a validation or checkpoint between them.

    Raises:
        RunError: TensorBoard is not installed, an iteration has no loss or gradient norm, or the
            last iterations are those of an earlier start.
    """
    events = _load(folder)
    loss, norm = _series(events, LOSS), _series(events, NORM)
    steps = sorted(loss)
    if not steps or loss.keys() != norm.keys() or steps[-1] - steps[0] != len(steps) - 1:
        raise RunError(
            f"a run to compare must have '{LOSS.megatron}' and '{NORM.megatron}' of every "
            f"iteration, got {len(loss)} losses, {len(norm)} norms and the tags "
            f"{sorted(events.Tags()['scalars'])}"
            f" in {folder}; train it with --tensorboard-log-interval 1"
        )
    arguments = _arguments(events)
    batches = [x.value for x in _series(events, BATCH).values()]
    tokens = float(np.median(batches)) * int(arguments.get("seq_length", 0)) if batches else 0.0
    seconds = np.diff([loss[step].wall_time for step in steps], prepend=np.nan)
    for older in np.flatnonzero(seconds < 0)[:1]:
        raise RunError(
            f"a run to compare must be of one job or its resumes, got iteration {steps[older]} "
            f"from before iteration {steps[older - 1]} in {folder}: an earlier start went further; "
            f"remove its event file"
        )
    curves = RunCurves(
        name,
        np.array([loss[step].value for step in steps]),
        np.array([norm[step].value for step in steps]),
        seconds,
        (tokens or np.nan) / np.where(seconds > 0, seconds, np.nan),
        validation={step: x.value for step, x in _series(events, VALIDATION).items()},
        loss_tokens=max(1.0, tokens),
        num_processes=int(arguments.get("world_size", 0)) or None,
        first_iteration=steps[0],
    )
    return curves, facts_of_arguments(arguments)


def _load(folder: Path) -> Any:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise RunError(
            f"reading {folder} needs tensorboard, which is not installed ({error}); "
            f"pip install 'megatron-magi[tensorboard]'"
        ) from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def _series(events: Any, tag: Tag) -> dict[int, Any]:
    """The last event of every iteration, by the first of the names that the run has."""
    known = next((name for name in tag if name in events.Tags()["scalars"]), None)
    return {event.step: event for event in events.Scalars(known)} if known else {}


def _arguments(events: Any) -> dict[str, str]:
    """Megatron's arguments that comparisons read, of the last start of the job."""
    names = ("seq_length", "world_size", "padded_vocab_size", "hidden_size", "init_method_std",
             "bf16", "fp16")  # fmt: skip
    known = [name for name in names if ARGUMENT.format(name) in events.Tags()["tensors"]]
    return {
        name: events.Tensors(ARGUMENT.format(name))[-1].tensor_proto.string_val[0].decode()
        for name in known
    }
