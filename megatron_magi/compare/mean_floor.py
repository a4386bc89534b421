"""A baseline that is the mean of several runs, and whose noise is each of them against the others.

A run's difference to the mean of n - 1 others has n / (n - 1) times a run's variance, and that of
another run to the mean of all n has (n + 1) / n times. So with three runs the noise is measured
too large by 6 %, and with two by 15 %; limits are not corrected for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import numpy as np

from megatron_magi.compare.differences import Curve, RunCurves
from megatron_magi.compare.evidence import Evidence, read_evidence
from megatron_magi.compare.gradient_errors import Baseline
from megatron_magi.compare.noise_floor import NoiseFloor, NoiseGates, require_noise
from megatron_magi.compare.run_error import RunError

K = TypeVar("K")


def read_mean_floor(
    folders: Sequence[Path], gates: NoiseGates, steps: int | None = None
) -> NoiseFloor:
    """Read the runs whose mean is the baseline.

    Args:
        folders: of two runs or more, equally long, of one recipe.
        steps: that are compared. Runs that all have them are cut to the length of the shortest.

    Raises:
        RunError: fewer, other lengths, vocabularies or dtypes, inf or nan, or two equal runs.
    """
    if len(set(folders)) < 2:
        raise RunError(
            f"a mean needs two runs or more, got {', '.join(map(str, folders))}; name another one"
        )
    baseline = Baseline(tuple(folders))
    found = [read_evidence(run, baseline.without(run)) for run in folders]
    shortest = min(len(evidence.curves.loss) for evidence in found)
    if steps is not None and steps <= shortest:
        found = [evidence.first(shortest) for evidence in found]
    _require_alike(found)
    for (one, evidence), (other, another) in combinations(zip(folders, found, strict=True), 2):
        require_noise(other, another, one, evidence)
    curves = [evidence.curves for evidence in found]
    mean = mean_of(curves, baseline.name)
    noises = tuple(
        replace(evidence, curves=_against_others(i, curves, mean))
        for i, evidence in enumerate(found)
    )
    return NoiseFloor(replace(found[0], curves=mean, gradients=[]), noises, gates)


def mean_of(runs: Sequence[RunCurves], name: str) -> RunCurves:
    """The mean of runs' curves, step by step."""
    return _combined(runs[0], name, lambda get: np.mean([get(run) for run in runs], axis=0))


def _against_others(at: int, runs: list[RunCurves], mean: RunCurves) -> RunCurves:
    """A curve that differs from the mean of all as the run does from the mean of the others."""
    run = runs[at]
    others = mean_of(runs[:at] + runs[at + 1 :], "others")
    return _combined(run, run.name, lambda get: get(mean) * get(run) / get(others))


def _combined(
    like: RunCurves, name: str, combine: Callable[[Callable[[RunCurves], Curve]], Curve]
) -> RunCurves:
    """Curves and held-out losses that ``combine`` makes of what it is told to get of runs."""

    def by_key(get: Callable[[RunCurves], Mapping[K, float]]) -> dict[K, float]:
        keys = list(get(like))
        losses = combine(lambda run: np.array([get(run)[key] for key in keys]))
        return dict(zip(keys, losses.tolist(), strict=True))

    return replace(
        like,
        name=name,
        loss=combine(lambda run: run.loss),
        grad_norm=combine(lambda run: run.grad_norm),
        validation=by_key(lambda run: run.validation),
        by_position=by_key(lambda run: run.by_position),
    )


def _require_alike(found: Sequence[Evidence]) -> None:
    """Raise RunError for runs that have no mean."""
    for evidence in found:
        if evidence.num_not_finite:
            raise RunError(
                f"runs of a mean must be finite, got {evidence.num_not_finite} values that are inf "
                f"or nan in {evidence.curves.name}; train it again"
            )
    first = found[0]
    for other in found[1:]:
        if _kind(other) != _kind(first):
            raise RunError(
                f"runs of a mean must have the same steps, validations and recipe, got others in "
                f"{other.curves.name} than in {first.curves.name}; train them with one recipe"
            )


def _kind(evidence: Evidence) -> tuple[object, ...]:
    """Facts that are equal in all runs of a mean."""
    run = evidence.curves
    steps = (run.first_iteration, len(run.loss))
    return *steps, set(run.validation), set(run.by_position), evidence.model
