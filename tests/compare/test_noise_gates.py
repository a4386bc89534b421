"""Each gate on runs written as values: what it measures, its limit, and when it is skipped."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from megatron_magi.compare import noise_floor
from megatron_magi.compare.differences import Curve
from megatron_magi.compare.evidence import Evidence, ModelFacts
from megatron_magi.compare.gradient_errors import GradientError
from megatron_magi.compare.noise_floor import NoiseFloor, NoiseGates
from megatron_magi.compare.noise_gates import GateResult, Judged, judge
from megatron_magi.compare.run_error import RunError
from tests.compare.evidence import curves, gradient_error

STEPS = 60
RECIPE = ModelFacts("bf16", 400, 0.5)
LOSS = 0.5 + (RECIPE.untrained_loss - 0.5) * np.exp(-np.arange(STEPS) / 8)
"""Begins where an untrained model does, and falls by 5.7 nats."""
TURNS = np.where(np.arange(STEPS) % 2, 1e-3, -1e-3)
TURNS[0] = 0.0
"""Differences of the noise run, up and down by turns."""
TOKENS = 4096
FLOOR = 2**-8 / 64
"""One rounding step of a loss of so many bf16 tokens, relative."""
VALIDATION = {20: 2.0, 40: 1.5, 60: 1.2}


def run(
    difference: Curve | float,
    *gradients: GradientError,
    steps: int = STEPS,
    validation: dict[int, float] | None = None,
    recipe: ModelFacts | None = RECIPE,
    **more: Any,
) -> Evidence:
    """A run with these relative differences from the curve."""
    loss = (LOSS * (1 + np.broadcast_to(difference, STEPS)))[:steps]
    validated = VALIDATION if validation is None else validation
    made = curves("run", loss, loss_tokens=TOKENS, validation=validated, **more)
    return Evidence(made, recipe, list(gradients))


def floor_of(*noises: Evidence, baseline: Evidence | None = None, **gates: Any) -> NoiseFloor:
    return NoiseFloor(baseline or run(0.0), noises or (run(TURNS),), NoiseGates(**gates))


def results(run: Evidence, floor: NoiseFloor, **how: Any) -> dict[str, GateResult]:
    return {r.name: r for r in judge(run, floor, **how).results}


def test_a_run_like_the_noise_passes() -> None:
    gradients = gradient_error("w", 0.01)
    floor = floor_of(run(TURNS, gradients))
    judged = judge(run(-TURNS, gradients), floor)
    assert judged.passed and judged.caught_by == [] and len(judged.results) == 9
    assert all(result.passed for result in judged.results)
    np.testing.assert_allclose(judged.difference, -TURNS, atol=1e-15)
    np.testing.assert_allclose(judged.noise, [TURNS], atol=1e-15)


def test_a_gate_counts_to_its_limit_and_skipped_ones_do_not() -> None:
    names = ("loss_start", "mean_loss", "loss_drop")

    def judged(*passed: bool | None) -> Judged:
        made = [GateResult(n, p, 0.0, 0.0, "") for n, p in zip(names, passed, strict=True)]
        return Judged(run(0.0).curves, run(0.0).curves, TURNS, TURNS[None], made)

    assert judged(True, None, True).passed and judged(None, None, None).passed
    wrong = judged(False, False, None)
    assert not wrong.passed and wrong.caught_by == ["mean_loss"]
    untrained = judged(False, None, False)
    assert not untrained.passed and untrained.caught_by == [], "not told from the baseline"


def test_step_1_is_judged_up_and_down() -> None:
    for first in (9e-5, -9e-5, 1.1e-4, -1.1e-4):
        found = results(run(np.where(np.arange(STEPS), TURNS, first)), floor_of())["step_1_loss"]
        assert found.value == pytest.approx(abs(first)) and found.limit == 1e-4
        assert found.passed is (abs(first) < 1e-4) and found.text.endswith("at step 1")


def test_the_mean_of_sizes_has_two_limits() -> None:
    """A multiple of the noise's, and one that no noise lifts."""
    size = np.abs(TURNS).mean()
    found = results(run(1.9 * TURNS), floor_of())["mean_loss"]
    assert found.value == pytest.approx(1.9 * size) and found.limit == pytest.approx(2 * size)
    assert found.passed and not results(run(2.1 * TURNS), floor_of())["mean_loss"].passed
    found = results(run(2.6 * TURNS), floor_of(run(5 * TURNS)))["mean_loss"]
    assert found.limit == 0.0025 and found.passed is False
    assert results(run(TURNS), floor_of(run(1e-9 * TURNS)))["mean_loss"].limit == 2 * FLOOR


def test_the_mean_of_differences_shows_a_bias() -> None:
    noises = run(TURNS), run(TURNS + 3e-4 * (np.arange(STEPS) > 0))
    relative = np.stack([n.curves.loss / LOSS - 1 for n in noises])
    scale = noise_floor.mean_scale_of_runs(relative)
    for sign in (1, -1):
        ours = run(TURNS + sign * 2.5e-4 * (np.arange(STEPS) > 0))
        found = results(ours, floor_of(*noises))["mean_bias"]
        bias = float((ours.curves.loss / LOSS - 1).mean())
        assert found.value == pytest.approx(abs(bias)) and found.limit == pytest.approx(2 * scale)
        assert found.passed and f"signed mean {bias:+.1e}" in found.text


def test_a_mean_of_many_roundings_has_a_smaller_floor() -> None:
    """They are independent of each other; a single step's floor would let a bias through."""
    found = results(run(TURNS), floor_of(run(1e-9 * TURNS)))["mean_bias"]
    assert found.limit == pytest.approx(2 * FLOOR / math.sqrt(STEPS))


@pytest.mark.parametrize("steps", [noise_floor.MIN_STEPS - 1, noise_floor.MIN_STEPS])
def test_few_steps_have_no_mean(steps: int) -> None:
    found = results(run(TURNS, steps=steps), floor_of(), allow_shorter=True)
    for name in ("mean_loss", "mean_bias"):
        assert (found[name].passed is None) == (steps < noise_floor.MIN_STEPS)
    if steps < noise_floor.MIN_STEPS:
        assert found["mean_bias"].text == "a mean over the run needs 20 steps, got 19"


def test_the_last_steps_are_compared_in_nats() -> None:
    late = np.arange(STEPS) >= 50
    noise = run(TURNS + 2e-3 * late)
    floor = floor_of(noise, last_steps=10)
    scale = noise_floor.mean_scale((noise.curves.loss - LOSS)[-10:])
    for times in (1.9, 2.1, -1.9, -2.1):
        nats = times * scale
        found = results(run(TURNS * ~late + nats * late / LOSS), floor)["last_steps"]
        assert found.value == pytest.approx(abs(nats)) and found.limit == pytest.approx(2 * scale)
        assert found.passed is (abs(times) < 2)
        assert found.text.startswith("nats between means of the last 10 steps")


def test_a_mean_of_the_last_steps_has_a_floor_in_nats() -> None:
    floor = floor_of(run(1e-9 * TURNS), last_steps=16)
    found = results(run(TURNS), floor)["last_steps"]
    assert found.limit == pytest.approx(2 * FLOOR * LOSS[-1] / 4)


def test_fewer_steps_than_the_last_ones_have_no_mean() -> None:
    short = run(TURNS, steps=49)
    found = results(short, floor_of(), allow_shorter=True)["last_steps"]
    assert found.passed is None and found.text.endswith("needs as many, got 49")
    enough = run(TURNS, steps=50)
    assert results(enough, floor_of(), allow_shorter=True)["last_steps"].passed is not None


def test_validation_is_the_last_that_all_runs_have() -> None:
    """Its scale is that of every shared step, so one that happens to agree does not count alone."""
    noise = run(TURNS, validation={20: 2.006, 40: 1.492, 50: 9.0})
    floor = floor_of(noise)
    scale = math.sqrt((0.006**2 + 0.008**2) / 2)
    for gap in (1.9 * scale, -1.9 * scale, 2.1 * scale):
        ours = run(TURNS, validation={40: 1.5 + gap, 60: 1.2})
        found = results(ours, floor_of(run(TURNS, validation={40: 1.5 + scale})))["validation"]
        assert found.value == pytest.approx(abs(gap)) and found.limit == pytest.approx(2 * scale)
        assert found.passed is (abs(gap) < 2 * scale)
        assert found.text.startswith("nats between validation losses at step 40")
        both = results(run(TURNS, validation={20: 2.0, 40: 1.5 + gap}), floor)["validation"]
        assert both.limit == pytest.approx(2 * scale) and both.value == found.value


def test_every_validation_is_judged_as_if_the_runs_ended_with_it() -> None:
    """A last validation that agrees hides an earlier one that does not."""
    noise = run(TURNS, validation={20: 2.006, 40: 1.492, 60: 1.201})
    ours = run(TURNS, validation={20: 2.0, 40: 1.52, 60: 1.2})
    assert results(ours, floor_of(noise))["validation"].passed
    judged = judge(ours, floor_of(noise, every_validation=True, last_steps=10))
    found = [result for result in judged.results if result.name == "validation"]
    assert [result.passed for result in found] == [True, False, True]
    for result, steps in zip(found, (20, 40, 60), strict=True):
        alone = floor_of(noise, last_steps=10)
        cut = judge(ours.first(steps), alone, allow_shorter=True).results
        assert result in cut and f"at step {steps} (" in result.text
    assert not judged.passed and judged.caught_by == ["validation"]
    never = results(run(TURNS, validation={}), floor_of(noise, every_validation=True))
    assert never["validation"].passed is None


def test_validation_is_no_better_known_than_the_last_steps() -> None:
    found = results(run(TURNS), floor_of(run(TURNS)))
    assert found["validation"].value == 0 and found["validation"].passed
    assert found["validation"].limit == found["last_steps"].limit > 0
    none = results(run(TURNS, validation={30: 1.0}), floor_of())["validation"]
    assert none.passed is None and "share no validated step" in none.text


@pytest.mark.parametrize("vocabulary, passes", [(400, True), (540, False), (290, False)])
def test_a_run_begins_where_an_untrained_model_does(vocabulary: int, passes: bool) -> None:
    facts = ModelFacts("bf16", vocabulary, 0.5)
    found = results(run(TURNS, recipe=facts), floor_of())["loss_start"]
    assert found.passed is passes and found.limit == 0.3
    assert found.value == pytest.approx(abs(LOSS[0] - math.log(vocabulary) - 0.25))


def test_a_run_without_a_beginning_or_model_facts_has_no_first_loss() -> None:
    found = results(run(TURNS, recipe=None), floor_of())["loss_start"]
    assert found.passed is None and "no model.json" in found.text
    late = {"first_iteration": 2}
    floor = floor_of(run(TURNS, **late), baseline=run(0.0, **late))
    found = results(run(TURNS, **late), floor)
    assert found["loss_start"].passed is None and found["loss_drop"].passed is None
    assert found["loss_drop"].text == "the run goes on from a checkpoint"
    assert found["step_1_loss"].text.endswith("at step 2")


def test_a_run_falls_by_as_much_as_is_asked_for() -> None:
    """From its first loss to the mean of its last five."""
    drop = float(LOSS[0] - LOSS[-5:].mean())
    for asked in (drop - 0.01, drop + 0.01):
        found = results(run(0.0), floor_of(loss_drop=asked))["loss_drop"]
        assert found.value == pytest.approx(drop) and found.limit == asked
        assert found.passed is (asked < drop)


def test_a_shorter_run_is_judged_over_its_own_steps() -> None:
    with pytest.raises(RunError, match="equally long, got 40 iterations of run and 60"):
        judge(run(TURNS, steps=40), floor_of())
    judged = judge(run(TURNS, steps=40), floor_of(), allow_shorter=True)
    assert judged.difference.shape == (40,) and judged.noise.shape == (1, 40)
    assert (len(judged.run.loss), len(judged.baseline.loss)) == (40, 40)
    drop = judged.results[-1]
    assert drop.passed is None and drop.text == "the run is shorter than the baseline"


def test_short_noise_runs_shorten_the_comparison_if_none_is_longer() -> None:
    short = run(TURNS, steps=30)
    judged = judge(run(TURNS), floor_of(short), allow_shorter=True)
    assert judged.difference.shape == (30,) and judged.results[-1].passed is None
    beside = judge(run(TURNS), floor_of(short, run(TURNS)))
    assert beside.difference.shape == (STEPS,) and beside.noise.shape == (1, STEPS)
