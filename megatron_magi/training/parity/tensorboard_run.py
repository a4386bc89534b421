"""The curves of a run that Megatron wrote with --tensorboard-dir."""

from __future__ import annotations

from pathlib import Path

from megatron_magi.training.recipe.recipe_error import RecipeError

LOSS, NORM, TIME, VALIDATION = "lm loss", "grad-norm", "iteration-time", "lm loss validation"
"""Megatron's tags; TIME needs --log-timers-to-tensorboard."""

Series = dict[int, float]


def has_events(folder: Path) -> bool:
    return any(folder.glob("events.out.tfevents.*"))


def read_series(folder: Path) -> dict[str, Series]:
    """Returns the values of each of Megatron's tags, by iteration.

    A run that resumed has written some iterations twice; the last value counts.

    Raises:
        RecipeError: loss or gradient norm of an iteration is missing, or TensorBoard is.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise RecipeError(f"{folder} requires tensorboard ({error}); pip install it") from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    known = events.Tags()["scalars"]
    series = {
        tag: {e.step: e.value for e in events.Scalars(tag)} if tag in known else {}
        for tag in (LOSS, NORM, TIME, VALIDATION)
    }
    steps = sorted(series[LOSS])
    if not steps or steps != sorted(series[NORM]) or steps[-1] - steps[0] + 1 != len(steps):
        raise RecipeError(
            f"a run to compare requires '{LOSS}' and '{NORM}' of every iteration, got "
            f"{', '.join(known) or 'nothing'} in {folder}; train it with --log-interval 1 "
            f"--tensorboard-log-interval 1"
        )
    return series
