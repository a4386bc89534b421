"""Decides whether a run equals the baseline up to rounding, which noise runs measure.

A noise run is the baseline trained once more with a step's samples in another order, or with
another kernel of the same precision. See docs/guides/compare_runs.md for what each gate finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_magi.compare.differences import Curve, RunCurves, common_steps
from megatron_magi.compare.evidence import Evidence
from megatron_magi.compare.gradient_errors import GradientError
from megatron_magi.compare.noise_floor import (
    MIN_STEPS,
    NoiseFloor,
    NoiseGates,
    mean_scale_of_runs,
    root_mean_square,
)
from megatron_magi.compare.positions import Bucket
from megatron_magi.compare.run_error import RunError

ABOUT_TRAINING = ("loss_start", "loss_drop")
"""Gates of learning as such; a control that fails only these is not caught."""


@dataclass(frozen=True)
class GateResult:
    """One gate on one run."""

    name: str
    passed: bool | None
    """None: skipped."""
    value: float
    limit: float
    text: str
    """The two values that were compared, or why the gate was skipped."""


@dataclass(frozen=True)
class Judged:
    """A run with its baseline and noise runs, over the steps that all have."""

    run: RunCurves
    baseline: RunCurves
    difference: Curve
    """loss / baseline - 1, per iteration."""
    noise: Curve
    """The same for the noise runs, [num_noise_runs, iterations]."""
    results: list[GateResult]

    @property
    def passed(self) -> bool:
        """True if every gate passes that was not skipped."""
        return all(r.passed is not False for r in self.results)

    @property
    def caught_by(self) -> list[str]:
        """Names of the gates that the run fails, without those of learning."""
        failed = [r.name for r in self.results if r.passed is False]
        return [name for name in dict.fromkeys(failed) if name not in ABOUT_TRAINING]


def judge(run: Evidence, floor: NoiseFloor, allow_shorter: bool = False) -> Judged:
    """Apply every gate to a run, over the steps that it, the baseline and the noise runs have.

    Raises:
        RunError: runs of other lengths, see `common_steps`, or with other parameters.
    """
    curves, baseline = common_steps(run.curves, floor.baseline.curves, allow_shorter)
    noises = [
        common_steps(noise, floor.baseline.curves, allow_shorter)[0] for noise in floor.noise_curves
    ]
    steps = min(len(c.loss) for c in (curves, *noises))
    whole = len(floor.baseline.curves.loss) == steps
    curves, baseline, *noises = (c.first(steps) for c in (curves, baseline, *noises))
    ours = _relative(curves, baseline)
    theirs = np.stack([_relative(noise, baseline) for noise in noises])
    judged = Judged(curves, baseline, ours, theirs, [])
    results = [
        _gate("finite", run.num_not_finite, 0, "losses, norms and gradients that are inf or nan"),
        _gate(
            "step_1_loss",
            abs(float(ours[0])),
            floor.gates.step_1_loss,
            f"relative difference at step {curves.first_iteration}",
        ),
        _gradients(run, floor),
        *_means(judged, floor),
        _last_steps(judged, noises, floor),
        *_held_out(judged, noises, floor),
        _start(judged, run, floor.gates),
        _drop(judged, floor.gates, whole),
    ]
    return replace(judged, results=results)


def _relative(run: RunCurves, baseline: RunCurves) -> Curve:
    return np.asarray(run.loss / baseline.loss - 1)


def _gate(name: str, value: float, limit: float, text: str) -> GateResult:
    return GateResult(name, bool(value <= limit), value, limit, text)


def _skipped(name: str, why: str) -> GateResult:
    return GateResult(name, None, math.nan, math.nan, why)


def _gradients(run: Evidence, floor: NoiseFloor) -> GateResult:
    found = worst_gradient(run.gradients, floor.noise_gradients, floor.gradient_floor)
    if found is None:
        return _skipped("gradients", "this run and the noise runs share no measured iteration")
    ratio, text = found
    return _gate("gradients", ratio, floor.gates.gradient_ratio, text)


def _means(judged: Judged, floor: NoiseFloor) -> list[GateResult]:
    """Mean of absolute differences (size) and signed mean (a bias)."""
    gates, steps = floor.gates, len(judged.difference)
    if steps < MIN_STEPS:
        why = f"a mean over the run needs {MIN_STEPS} steps, got {steps}"
        return [_skipped("mean_loss", why), _skipped("mean_bias", why)]
    size = float(np.abs(judged.difference).mean())
    noise_size = max(float(np.abs(judged.noise).mean()), floor.loss_floor)
    bias = float(judged.difference.mean())
    # Rounding in different steps is independent, so its mean shrinks with the number of steps.
    scale = max(mean_scale_of_runs(judged.noise), floor.loss_floor / math.sqrt(steps))
    return [
        _gate("mean_loss", size, min(gates.mean_loss, gates.noise_ratio * noise_size),
              f"mean |relative difference| of {steps} steps (noise {noise_size:.1e})"),
        _gate("mean_bias", abs(bias), gates.noise_ratio * scale,
              f"signed mean {bias:+.1e} of {steps} steps (scale of the noise {scale:.1e})"),
    ]  # fmt: skip


def _last_steps(judged: Judged, noises: list[RunCurves], floor: NoiseFloor) -> GateResult:
    number = floor.gates.last_steps
    if len(judged.run.loss) < number:
        why = f"a mean of the last {number} steps needs as many, got {len(judged.run.loss)}"
        return _skipped("last_steps", why)
    value = abs(float((judged.run.loss - judged.baseline.loss)[-number:].mean()))
    scale = _last_scale(noises, judged.baseline, floor)
    text = f"nats between means of the last {number} steps (scale of the noise {scale:.1e})"
    return _gate("last_steps", value, floor.gates.noise_ratio * scale, text)


def _last_scale(noises: list[RunCurves], baseline: RunCurves, floor: NoiseFloor) -> float:
    """Noise scale of the mean loss of the last steps, nats."""
    number = floor.gates.last_steps
    gaps = np.stack([(noise.loss - baseline.loss)[-number:] for noise in noises])
    one_rounding = floor.loss_floor * float(baseline.loss[-1]) / math.sqrt(len(gaps[0]))
    return max(mean_scale_of_runs(gaps), one_rounding)


def _held_out(judged: Judged, noises: list[RunCurves], floor: NoiseFloor) -> list[GateResult]:
    """The gates of held-out losses, of the last validation or of every one. An earlier one is
    judged as if the runs ended with it."""
    lengths = [len(judged.run.loss)]
    if floor.gates.every_validation:
        before_first = judged.run.first_iteration - 1
        steps = {*_validated(judged, noises), *(b.iteration for b in _buckets(judged, noises))}
        lengths = [step - before_first for step in sorted(steps)] or lengths
    found = []
    for length in lengths:
        cut = replace(judged, run=judged.run.first(length), baseline=judged.baseline.first(length))
        others = [noise.first(length) for noise in noises]
        found += [_validation(cut, others, floor), *_positions(cut, others, floor)]
    return found


def _validated(judged: Judged, noises: list[RunCurves]) -> list[int]:
    """Steps after which all runs were validated."""
    runs = (judged.baseline, *noises)
    return sorted(set(judged.run.validation).intersection(*(run.validation for run in runs)))


def _buckets(judged: Judged, noises: list[RunCurves]) -> list[Bucket]:
    """Positions in validations of all runs."""
    runs = (judged.baseline, *noises)
    return sorted(set(judged.run.by_position).intersection(*(run.by_position for run in runs)))


def _validation(judged: Judged, noises: list[RunCurves], floor: NoiseFloor) -> GateResult:
    ours, theirs = judged.run.validation, judged.baseline.validation
    shared = _validated(judged, noises)
    if not shared:
        return _skipped("validation", "run, baseline and noise runs share no validated step")
    last = shared[-1]
    gaps = np.array([noise.validation[i] - theirs[i] for noise in noises for i in shared])
    scale = max(root_mean_square(gaps), _last_scale(noises, judged.baseline, floor))
    text = f"nats between validation losses at step {last} (scale of the noise {scale:.1e})"
    return _gate("validation", abs(ours[last] - theirs[last]), floor.gates.noise_ratio * scale,
                 text)  # fmt: skip


def _positions(judged: Judged, noises: list[RunCurves], floor: NoiseFloor) -> list[GateResult]:
    """The bucket of the last validation that is furthest off; nothing if the baseline has none."""
    if not floor.baseline.curves.by_position:
        return []
    ours, theirs = judged.run.by_position, judged.baseline.by_position
    shared = _buckets(judged, noises)
    if not shared:
        return [_skipped("positions", "run, baseline and noise runs share no loss by position")]
    gaps = np.array([noise.by_position[b] - theirs[b] for noise in noises for b in shared])
    scale = max(root_mean_square(gaps), _last_scale(noises, judged.baseline, floor))
    last = [b for b in shared if b.iteration == shared[-1].iteration]
    worst = max(last, key=lambda b: abs(ours[b] - theirs[b]))
    text = (
        f"nats between validation losses of positions {worst.first} to {worst.end} at step "
        f"{worst.iteration} (scale of the noise {scale:.1e})"
    )
    value = abs(ours[worst] - theirs[worst])
    return [_gate("positions", value, floor.gates.noise_ratio * scale, text)]


def _start(judged: Judged, run: Evidence, gates: NoiseGates) -> GateResult:
    if judged.run.first_iteration > 1:
        return _skipped("loss_start", "the run goes on from a checkpoint")
    if run.model is None:
        return _skipped(
            "loss_start", "the run has no model.json and no logged arguments with its vocabulary"
        )
    expected = run.model.untrained_loss
    value = abs(float(judged.run.loss[0]) - expected)
    text = (
        f"nats between the first loss and an untrained model's {expected:.3f} (vocabulary "
        f"{run.model.vocab_size}, variance of logits {run.model.logit_variance:.2f})"
    )
    return _gate("loss_start", value, gates.loss_start, text)


def _drop(judged: Judged, gates: NoiseGates, whole: bool) -> GateResult:
    if not whole or judged.run.first_iteration > 1:
        why = "is shorter than the baseline" if not whole else "goes on from a checkpoint"
        return _skipped("loss_drop", f"the run {why}")
    last = judged.run.loss[-5:].mean()
    drop = float(judged.run.loss[0] - last)
    text = f"nats by which the loss fell, at least (last five steps: {last:.3f})"
    return GateResult("loss_drop", bool(drop >= gates.loss_drop), drop, gates.loss_drop, text)


def worst_gradient(
    errors: Sequence[GradientError], noise: Sequence[GradientError], floor: float
) -> tuple[float, str] | None:
    """(largest relative error over noise, what it was); None if no iteration is in both.

    The noise of a parameter is the noise run's error of it in that iteration, or `floor` if that is
    larger. Before the first update, samples in another order change only the last bits of a
    gradient's single-precision sums, far less than rounding activations once does.

    Raises:
        RunError: a parameter that the noise run does not have.
    """
    noise_of = {(e.iteration, e.parameter): e.relative_error for e in noise}
    iterations = {i for i, _ in noise_of}
    shared = [e for e in errors if e.iteration in iterations]
    if not shared:
        return None
    missing = {(e.iteration, e.parameter) for e in shared} ^ {
        k for k in noise_of if k[0] in {e.iteration for e in shared}
    }
    if missing:
        raise RunError(
            f"the run and the noise run must have the same parameters, got only one with "
            f"{sorted(missing)[0][1]}; save both with one layout"
        )
    ratios = [e.relative_error / max(noise_of[e.iteration, e.parameter], floor) for e in shared]
    at = max(range(len(ratios)), key=lambda i: math.inf if math.isnan(ratios[i]) else ratios[i])
    worst, measured = shared[at], noise_of[shared[at].iteration, shared[at].parameter]
    text = (
        f"{worst.parameter} at step {worst.iteration}: error {worst.relative_error:.1e}, noise "
        f"{measured:.1e}{f', counted as {floor:.1e}' if floor > measured else ''}; worst of "
        f"{len(shared)} gradients of steps {sorted({e.iteration for e in shared})}"
    )
    return ratios[at], text
